"""Fail-over: six faults, each against the replica that leads; how long nobody works, and how long two do."""

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from laboratory.network import Host, Network, RemotePostgres
from laboratory.servers import Postgres, embedded_binaries, own_directory, wait_until
from laboratory.service import Replica

from . import spans
from .contestants import Contestant, end, give_tables

REPLICAS = 3
WATCHED = 30.0  # seconds after a fault that may leave two leaders; "without end" in the tables means that long
PAUSED = 20.0  # seconds of SIGSTOP
DOWN = 3.0  # seconds that the server is away in a restart
PATIENCE = 90.0  # seconds to wait for somebody to lead
SETTLED = 1.0  # seconds of a new leader after which a fault that ends the old process is over

_serial = count(1)


@dataclass(frozen=True)
class Trial:
    """What happened after one fault: seconds in which nobody worked, and in which two did; `over` is how long we watched."""

    contestant: str
    fault: str
    role: str
    nobody: float
    several: float
    over: float


@dataclass
class Stage:
    """A database of one trial, its replicas and what is known of them."""

    contestant: Contestant
    postgres: Postgres
    url: str  # as its replicas reach it
    directory: Path
    replicas: list[Replica]
    hosts: list[Host]

    def spans(self, role: str) -> list[spans.Span]:
        return spans.read(self.directory).get(role, [])

    def leader(self) -> Replica:
        """Who works alone in the first of its roles."""
        role = next(iter(self.contestant.roles))

        def alone() -> Replica | None:
            found = spans.working(self.spans(role), time.monotonic())
            return next((each for each in self.replicas if found == {each.pid}), None)

        leader: Replica = wait_until(alone, PATIENCE, f"one replica of {self.contestant.name} leads")
        return leader

    def others_work(self, victim: Replica, since: float) -> bool:
        """Whether each role has somebody else who has worked for a while."""
        return all(
            any(
                span.pid != victim.pid and span.last > since and span.last - max(span.first, since) > SETTLED
                for span in self.spans(role)
            )
            for role in self.contestant.roles
        )

    def watch(self, since: float, *more: float) -> None:
        time.sleep(max(0.0, since + WATCHED + sum(more) - time.monotonic()))


def by_signal(number: signal.Signals) -> Callable[[Stage, Replica], None]:
    def fault(stage: Stage, leader: Replica) -> None:
        at = time.monotonic()
        leader.signal(number)
        wait_until(lambda: stage.others_work(leader, at), PATIENCE, f"another replica of {stage.contestant.name} leads")

    return fault


def pause(stage: Stage, leader: Replica) -> None:
    at = time.monotonic()
    leader.signal(signal.SIGSTOP)
    time.sleep(PAUSED)
    leader.signal(signal.SIGCONT)
    stage.watch(at)


def terminate(stage: Stage, leader: Replica) -> None:
    """End the sessions of the leader: those that hold an advisory lock, or all of its process where it holds none."""
    at = time.monotonic()
    with stage.postgres.connect() as conn:
        ended = conn.execute(
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
            " and database = (select oid from pg_database where datname = current_database())"
        ).fetchall()
        if not ended:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
                " and pid <> pg_backend_pid()"
            )
    stage.watch(at)


def restart(stage: Stage, leader: Replica) -> None:
    at = time.monotonic()
    stage.postgres.stop()
    time.sleep(DOWN)
    stage.postgres.start()
    stage.watch(at)


def host_loss(stage: Stage, leader: Replica) -> None:
    at = time.monotonic()
    host = stage.hosts[stage.replicas.index(leader)]
    host.isolate()
    stage.watch(at)
    host.heal()


FAULTS: dict[str, Callable[[Stage, Replica], None]] = {
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGKILL": by_signal(signal.SIGKILL),
    "session terminated": terminate,
    "server restart": restart,
    "SIGSTOP": pause,
    "host loss": host_loss,
}


@contextmanager
def stage(
    contestant: Contestant, network: Network | None = None, *, replicas: int = REPLICAS, settings: Sequence[str] = ()
) -> Iterator[Stage]:
    """A server and replicas that wait for their part; each on a host of its own where there is a network."""
    directory = Path(tempfile.mkdtemp(prefix="bench-"))
    directory.chmod(0o755)
    records = own_directory(directory / "records")
    hosts: list[Host] = []
    if network is None:
        postgres = Postgres(directory / "postgres", embedded_binaries())
        url = postgres.url()
    else:
        hosts = [network.host() for _ in range(replicas + 1)]
        postgres = RemotePostgres(directory / "postgres", embedded_binaries(), hosts[-1])
        with postgres.data.joinpath("pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.77.0.0/16 trust\n")
        url = postgres.remote_url()
    started: list[Replica] = []
    try:
        postgres.start(*settings)
        give_tables(contestant, postgres, records)
        for number in range(replicas):
            prefix = hosts[number].prefix if hosts else ()
            started.append(contestant.start(url, records, number, prefix))
        yield Stage(contestant, postgres, url, records, started, hosts)
    finally:
        end(started)
        postgres.stop()
        shutil.rmtree(directory)


def run_trial(contestant: Contestant, fault: str, network: Network | None) -> list[Trial]:
    with stage(contestant, network) as here:
        here.leader()
        time.sleep(1 + random.uniform(0, contestant.restless))  # any moment between two looks of its own
        leader = here.leader()
        at = time.monotonic()
        FAULTS[fault](here, leader)
        until = time.monotonic()
        trials = []
        for role, name in contestant.roles.items():
            found = here.spans(role)
            nobody, several = spans.seconds(found, at, until)
            if fault == "host loss":  # the work of a host that nobody reaches is nobody's
                nobody, _ = spans.seconds([span for span in found if span.pid != leader.pid], at, until)
            trials.append(Trial(name, fault, role, nobody, several, until - at))
        return trials


def measure(
    contestants: Sequence[Contestant], trials: int, faults: Sequence[str], at_once: int, tell: Callable[[str], None]
) -> list[Trial | str]:
    """All trials, some at a time. A trial that failed is a sentence instead."""

    network: Network | None = None

    def one(job: tuple[Contestant, str]) -> list[Trial | str]:
        contestant, fault = job
        try:
            found = run_trial(contestant, fault, network if fault == "host loss" else None)
        except (AssertionError, OSError) as error:
            tell(f"{contestant.name}, {fault}: failed: {error}")
            return [f"{contestant.name}, {fault}: {error}"]
        for trial in found:
            tell(f"{trial.contestant}, {fault}: nobody {trial.nobody:.2f} s, two {trial.several:.2f} s")
        return list(found)

    jobs = [(contestant, fault) for _ in range(trials) for fault in faults for contestant in contestants]
    random.shuffle(jobs)
    with ExitStack() as stack:
        network = stack.enter_context(Network()) if "host loss" in faults else None
        pool = stack.enter_context(ThreadPoolExecutor(at_once))
        return [trial for found in pool.map(one, jobs) for trial in found]
