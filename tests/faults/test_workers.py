"""Row 6: workers that don't do what the documentation asks of them."""

import contextlib
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest

from laboratory.servers import wait_until
from laboratory.service import QUICK, Fleet, Replica

INTERVAL, TTL = float(QUICK["INTERVAL_SECONDS"]), float(QUICK["TTL_SECONDS"])
KILL = 2.25  # seconds from the last good heartbeat to the end of the process
SLACK = 1.0  # seconds for a busy machine

WATCHDOG = (1, -signal.SIGSEGV)  # it may crash while it prints the stacks of running threads

TERMINATE_HOLDER = """
select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted
   and database = (select oid from pg_database where datname = current_database())
"""

pytestmark = pytest.mark.slow

Figures = dict[str, list[float]]


def lead(fleet: Fleet, behaviour: str, *, drain: float = 25, output: int | None = None) -> Replica:
    """A replica that leads as scheduler and misbehaves, and a good one that stands by."""
    environment = QUICK | {"DRAIN_TIMEOUT_SECONDS": str(drain)}
    (leader,) = fleet.start(roles=("scheduler",), behaviour=behaviour, environment=environment, output=output)
    wait_until(lambda: fleet.report().terms.get("scheduler"), 15, lambda: f"it leads: {leader.log}")
    (standby,) = fleet.start(roles=("scheduler",))
    fleet.wait_for_log("lease.standby", standby)
    return leader


def fill(pipe: int) -> None:
    """Write to a pipe that nobody reads until it takes no more."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b".")
    os.set_blocking(pipe, True)  # the flag belongs to all who write to it


def terminate_lease_session(fleet: Fleet) -> float:
    at = time.monotonic()
    with psycopg.connect(fleet.postgres.url(), autocommit=True) as conn:
        conn.execute(TERMINATE_HOLDER)
    return at


@pytest.mark.parametrize("behaviour", ["ignores", "sleeps"])
def test_a_worker_that_does_not_look_is_ended_with_its_process_before_another_begins(
    fleet: Fleet, figures: Figures, behaviour: str
) -> None:
    leader = lead(fleet, behaviour)
    at = terminate_lease_session(fleet)
    died_at = fleet.record_death(leader, "scheduler")
    assert leader.process.wait() in WATCHDOG
    figures[f"{behaviour}: death"].append(died_at - at)
    fleet.gap_after("scheduler", at)
    figures[f"{behaviour}: takeover"].append(fleet.report().terms["scheduler"][-1].first - at)
    assert died_at - at < KILL + SLACK
    assert figures[f"{behaviour}: takeover"][0] < TTL + SLACK
    fleet.assert_safe()


@pytest.mark.parametrize("behaviour", ["ignores", "sleeps"])
def test_a_worker_that_would_not_stop_keeps_its_lease_until_its_process_exits_with_70(
    fleet: Fleet, figures: Figures, behaviour: str
) -> None:
    leader = lead(fleet, behaviour, drain=2)
    at = time.monotonic()
    leader.signal(signal.SIGTERM)
    died_at = fleet.record_death(leader, "scheduler")
    assert leader.process.wait() == 70
    assert 2 <= died_at - at < 2 + SLACK
    assert "worker.would_not_stop" in leader.log
    figures[f"{behaviour}: takeover"].append(fleet.gap_after("scheduler", died_at))
    assert figures[f"{behaviour}: takeover"][0] < TTL + SLACK
    fleet.assert_safe()


def test_a_worker_that_holds_the_gil_is_ended_though_nothing_else_in_its_process_can_run(
    fleet: Fleet, figures: Figures
) -> None:
    leader = lead(fleet, "holds_the_gil")
    at = time.monotonic()
    (fleet.directory / "now").touch()
    died_at = fleet.record_death(leader, "scheduler")
    assert leader.process.wait() in WATCHDOG
    assert died_at - at < KILL + SLACK
    figures["death"].append(died_at - at)
    (fleet.directory / "now").unlink()
    fleet.gap_after("scheduler", died_at)
    figures["takeover"].append(fleet.report().terms["scheduler"][-1].first - at)
    assert figures["takeover"][0] < TTL + 2 * INTERVAL + SLACK
    fleet.assert_safe()


def test_a_full_pipe_for_the_log_keeps_no_process_alive(fleet: Fleet, figures: Figures) -> None:
    reader, writer = os.pipe()
    leader = lead(fleet, "ignores", output=writer)
    fill(writer)
    at = terminate_lease_session(fleet)
    died_at = fleet.record_death(leader, "scheduler")
    os.close(writer)
    os.close(reader)
    assert leader.process.wait() in WATCHDOG
    figures["death"].append(died_at - at)
    assert died_at - at < KILL + SLACK
    fleet.gap_after("scheduler", at)
    fleet.assert_safe()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_forked_child_neither_keeps_the_lease_of_its_dead_parent_nor_works_on(
    fleet: Fleet, figures: Figures, number: signal.Signals
) -> None:
    leader = lead(fleet, "forks")
    (mark,) = wait_until(lambda: list(fleet.directory.glob("child.*")), 5, "it forks")
    child = int(mark.suffix.removeprefix("."))
    try:
        at = time.monotonic()
        leader.signal(number)
        figures[f"{number.name}: takeover"].append(fleet.gap_after("scheduler", at))
        assert leader.process.wait(5) == (0 if number is signal.SIGTERM else -number)
        assert Path(f"/proc/{child}").exists(), "the child lives on"
        assert max(figures[f"{number.name}: takeover"]) < (TTL + SLACK if number is signal.SIGKILL else INTERVAL / 2)
        fleet.assert_safe()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("behaviour", ["raises", "returns"])
def test_a_worker_that_ends_each_time_backs_off_longer_and_others_take_their_turn(fleet: Fleet, behaviour: str) -> None:
    fleet.start(2, roles=("scheduler",), behaviour=behaviour)
    wait_until(lambda: len(fleet.report().terms.get("scheduler", [])) >= 6, 30, "six terms have ended")
    terms = fleet.assert_safe().terms["scheduler"]
    for replica in fleet.replicas:
        began = [term.first for term in terms if term.pid == replica.pid]
        assert len(began) >= 2, "each has its turn"
        for number, (one, next_one) in enumerate(pairwise(began)):
            assert next_one - one > 0.5 * 2**number, f"back-off number {number + 1}"
    assert ("worker.failed" if behaviour == "raises" else "worker.returned") in fleet.logs()
    assert fleet.stop() == [0, 0]


def test_where_one_fails_another_that_is_well_leads(fleet: Fleet, figures: Figures) -> None:
    (failing,) = fleet.start(roles=("scheduler",), behaviour="raises")
    fleet.wait_for_log("worker.failed", failing)
    (well,) = fleet.start(roles=("scheduler",))
    assert fleet.wait_for_leader("scheduler", other_than=failing) is well
    fleet.wait_for_log("lease.standby", failing)
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()
