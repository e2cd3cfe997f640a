"""Records a run with three faults and draws docs/takeover.svg from it: `uv run python tests/picture.py`.

Three replicas with the default timing. The replica that leads as scheduler is asked to stop, its successor is killed,
and the next one is stopped with SIGSTOP until another leads, then continued. After each fault a replica is started in
place of the one that ended. The checker reads the same record and must find it safe.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from laboratory.environment import clean_environment
from laboratory.picture import Fault, Life, draw
from laboratory.servers import Postgres, embedded_binaries, room_for_servers, wait_until
from laboratory.service import Fleet, Replica, install

TEMPLATE = Path(__file__).resolve().parents[1]
PICTURE = TEMPLATE / "docs" / "takeover.svg"
ROLES = ("poller", "scheduler")
NAMES = {"poller": "poller (fenced)", "scheduler": "scheduler (external)"}
DEFAULTS: dict[str, str] = {}
STEADY = 2.0  # seconds of leading before the next fault


class Lives:
    """When each process began and ended."""

    def __init__(self, fleet: Fleet) -> None:
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self._fleet = fleet

    def start(self, count: int = 1) -> list[Replica]:
        started = self._fleet.start(count, roles=ROLES, environment=DEFAULTS)
        for replica in started:
            self.began[replica.pid] = time.monotonic()
            descriptor = os.pidfd_open(replica.pid)
            threading.Thread(target=self._watch, args=(replica.pid, descriptor), daemon=True).start()
        return started

    def _watch(self, pid: int, descriptor: int) -> None:
        select.select([descriptor], [], [])
        self.ended[pid] = time.monotonic()
        os.close(descriptor)

    def lanes(self, until: float) -> list[Life]:
        return [
            Life(f"replica {chr(ord('A') + index)}", pid, began, self.ended.get(pid, until))
            for index, (pid, began) in enumerate(self.began.items())
        ]


def steady_leader(fleet: Fleet, other_than: Replica | None = None) -> Replica:
    """Wait until somebody (else) leads as scheduler, and goes on to do so for a while."""
    leader = fleet.wait_for_leader("scheduler", other_than=other_than)
    since = time.monotonic()

    def steady() -> bool:
        term = fleet.report().terms["scheduler"][-1]
        return term.pid == leader.pid and term.last - since > STEADY

    wait_until(steady, 15, "the leader works for a while")
    return leader


def record(fleet: Fleet) -> str:
    lives = Lives(fleet)
    faults: list[Fault] = []
    lives.start(3)

    def strike(victim: Replica, number: signal.Signals) -> None:
        faults.append(Fault(number.name, victim.pid, time.monotonic()))
        victim.signal(number)

    for number in (signal.SIGTERM, signal.SIGKILL):
        victim = steady_leader(fleet)
        strike(victim, number)
        victim.process.wait(15)
        lives.start()
    victim = steady_leader(fleet)
    strike(victim, signal.SIGSTOP)
    steady_leader(fleet, other_than=victim)
    strike(victim, signal.SIGCONT)  # it ends, or lives on as a stand-by
    steady_leader(fleet)
    until = time.monotonic()
    report = fleet.assert_safe()
    fleet.stop()
    fleet.assert_safe()
    title = "Three replicas, default timing: no instant with two leaders. Recorded, not drawn by hand."
    named = type(report)({NAMES[role]: terms for role, terms in report.terms.items()})
    return draw(title, named, list(NAMES.values()), lives.lanes(until), faults)


def main() -> int:
    with room_for_servers() as directory:
        bake = [sys.executable, "-m", "cookiecutter", "--no-input", "-o", str(directory), str(TEMPLATE)]
        subprocess.run(bake, env=clean_environment(), check=True, stdout=subprocess.DEVNULL)
        service = install(directory / "acme_billing")
        postgres = Postgres(directory / "postgres", embedded_binaries()).start()
        try:
            service.prepare(postgres)
            with Fleet(service, postgres) as fleet:
                PICTURE.write_text(record(fleet))
        finally:
            postgres.stop()
    print(f"drawn: {PICTURE.relative_to(TEMPLATE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
