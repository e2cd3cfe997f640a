"""A rolling deploy: old replicas are replaced one by one by new ones that promise another time to live."""

import contextlib
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping

import pytest

from laboratory.servers import Postgres, embedded_binaries
from laboratory.service import QUICK, ROLES, Fleet, Replica

pytestmark = pytest.mark.slow

SHORT = {"INTERVAL_SECONDS": "0.3", "TTL_SECONDS": "2", "STOP_GRACE_SECONDS": "0.5"}
LONG = {"INTERVAL_SECONDS": "0.5", "TTL_SECONDS": "5", "STOP_GRACE_SECONDS": "1"}
LONG_HORIZON = 5 - 0.5 - 5 / 24
ROUNDS = 10
REPLICAS = 3


@contextlib.contextmanager
def traffic(postgres: Postgres) -> Iterator[None]:
    """What else a database has to do: 100 transactions a second."""
    pgbench = embedded_binaries() / "pgbench"
    subprocess.run([pgbench, "-i", "-q", postgres.url()], check=True, capture_output=True)
    load = subprocess.Popen(
        [pgbench, "-n", "-c", "4", "-R", "100", "-T", "600", postgres.url()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
        assert load.poll() is None, "the load ended early"
    finally:
        load.terminate()
        load.wait()


def test_replacing_all_replicas_ten_times_leaves_no_two_leaders_and_small_gaps(
    fleet: Fleet, postgres: Postgres, figures: dict[str, list[float]]
) -> None:
    timings = [QUICK, LONG, SHORT]
    with traffic(postgres):
        running = start(fleet, REPLICAS, timings[0])
        fleet.wait_for_leaders()
        for turn in range(ROUNDS):
            coming = start(fleet, REPLICAS, timings[(turn + 1) % len(timings)])
            for replica in coming:
                fleet.wait_for_log("session.opened", replica)
            for old in running:
                at = time.monotonic()
                led = [role for role in ROLES if fleet.wait_for_leader(role) is old]
                old.signal(signal.SIGTERM)
                assert old.process.wait(30) == 0, old.log
                for role in led:
                    figures[role].append(fleet.gap_after(role, at))
            running = coming
        assert fleet.stop() == [0] * REPLICAS * (ROUNDS + 1)
    report = fleet.assert_safe()
    for role in ROLES:
        assert len(report.terms[role]) > ROUNDS, "each deploy moves each role at least once"
        assert statistics.median(figures[role]) < 0.2, role
        assert max(figures[role]) < 2, role


@pytest.mark.parametrize(("old", "new"), [(LONG, SHORT), (SHORT, LONG)], ids=["shorter", "longer"])
def test_a_new_replica_waits_as_long_as_the_old_one_has_promised(
    fleet: Fleet, figures: dict[str, list[float]], old: Mapping[str, str], new: Mapping[str, str]
) -> None:
    for _ in range(2):
        (leader,) = start(fleet, 1, old)
        fleet.wait_for_leaders()
        (successor,) = start(fleet, 1, new)
        fleet.wait_for_log("lease.standby", successor)
        at = time.monotonic()
        leader.signal(signal.SIGKILL)
        for role, gap in fleet.succession(leader, at).items():
            figures[f"{role} taken over"].append(gap)
            if role != "poller":
                # the last unit of work was done a moment before the kill
                assert (gap > LONG_HORIZON) == (old is LONG), gap
        fleet.assert_safe()
        fleet.stop()
    fleet.assert_safe()


def start(fleet: Fleet, count: int, timing: Mapping[str, str]) -> list[Replica]:
    return fleet.start(count, environment=timing)
