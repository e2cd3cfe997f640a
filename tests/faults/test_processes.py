"""Row 1: processes that are asked to stop, asked twice, or killed; leaders, stand-bys, and both in one instant."""

import signal
import time

import pytest

from laboratory.service import QUICK, Fleet

INTERVAL, TTL = float(QUICK["INTERVAL_SECONDS"]), float(QUICK["TTL_SECONDS"])
SLACK = 0.5  # for a machine that is busy with something else

pytestmark = pytest.mark.slow

Figures = dict[str, list[float]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_leader_asked_to_stop_hands_over_well_below_one_interval(
    fleet: Fleet, figures: Figures, number: signal.Signals
) -> None:
    for _ in range(4):
        leader, _ = fleet.line_up()
        at = time.monotonic()
        leader.signal(number)
        for role, gap in fleet.succession(leader, at).items():
            figures[f"{number.name} {role}"].append(gap)
        assert leader.process.wait(5) == 0
    for name, gaps in figures.items():
        assert max(gaps) < INTERVAL / 2, name
    fleet.assert_safe()


@pytest.mark.parametrize("other_thread", [False, True], ids=["process", "other_thread"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_ends_a_replica_at_once_whose_worker_ignores_the_first(
    fleet: Fleet, figures: Figures, second: signal.Signals, other_thread: bool
) -> None:
    """A signal to another thread is what the kernel is free to make of one to the process; it interrupts no wait of
    the main thread, as one does not that comes just before that wait (7 of 2,200, aimed at that instant).
    """
    leader, standby = fleet.line_up(behaviour="ignores")
    leader.signal(signal.SIGTERM)
    # the others, which do stop, are handed over; the one that does not keeps its lease
    for role in ("poller", "reconciler"):
        assert fleet.wait_for_leader(role, other_than=leader) is standby
    assert fleet.leader("scheduler") is leader
    at = time.monotonic()
    leader.signal(second, other_thread=other_thread)
    assert fleet.record_death(leader, "scheduler") - at < 0.5
    assert leader.process.wait(5) == 128 + second
    gaps = fleet.succession(leader, at)
    assert gaps["scheduler"] < TTL + SLACK
    figures[f"second {second.name}"].append(gaps["scheduler"])
    fleet.assert_safe()


def test_a_killed_leader_is_succeeded_within_ttl_and_fenced_within_two_intervals(
    fleet: Fleet, figures: Figures
) -> None:
    for _ in range(4):
        leader, _ = fleet.line_up()
        at = time.monotonic()
        leader.signal(signal.SIGKILL)
        for role, gap in fleet.succession(leader, at).items():
            figures[f"SIGKILL {role}"].append(gap)
    assert max(figures["SIGKILL poller"]) < 2 * INTERVAL + SLACK
    assert max(figures["SIGKILL scheduler"] + figures["SIGKILL reconciler"]) < TTL + SLACK
    fleet.assert_safe()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_stand_by_that_ends_changes_nothing(fleet: Fleet, number: signal.Signals) -> None:
    for _ in range(2):
        leader, standby = fleet.line_up()
        standby.signal(number)
        assert standby.process.wait(5) == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    assert fleet.leader("scheduler") is leader
    report = fleet.assert_safe()
    assert {role: len(terms) for role, terms in report.terms.items()} == dict.fromkeys(report.terms, 1)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_stand_by_asked_to_stop_as_the_leader_dies_never_begins_to_lead(fleet: Fleet, death: signal.Signals) -> None:
    for _ in range(2):
        leader, standby, third = fleet.line_up(standbys=2)
        standby.signal(signal.SIGTERM)
        leader.signal(death)
        assert standby.process.wait(5) == 0
        assert "worker.started" not in standby.log
        leader.process.wait(5)
        assert fleet.wait_for_leader("scheduler") is third
    fleet.assert_safe()


def test_a_stand_by_asked_to_stop_while_it_waits_out_a_dead_leader_never_begins_to_lead(fleet: Fleet) -> None:
    for _ in range(2):
        leader, standby = fleet.line_up()
        leader.signal(signal.SIGKILL)
        leader.process.wait(5)
        fleet.wait_for_log("lease.takeover_wait", standby)
        standby.signal(signal.SIGTERM)
        assert standby.process.wait(5) == 0
        started = [line for line in standby.log.splitlines() if "worker.started" in line]
        assert all("poller" in line for line in started), "only a fenced worker starts without a wait"
    fleet.assert_safe()
