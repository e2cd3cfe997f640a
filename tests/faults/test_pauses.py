"""Row 5: a leader is paused for longer than its lease lasts, and wakes up in the middle of what it did."""

import signal
import time

import pytest

from laboratory.servers import throughout, wait_until
from laboratory.service import QUICK, Fleet, Replica

INTERVAL, TTL = float(QUICK["INTERVAL_SECONDS"]), float(QUICK["TTL_SECONDS"])
SLACK = 0.5  # for a machine that is busy with something else

#: How a process may end that wakes up past its deadline: by the watchdog, or by a crash while that prints the stacks.
WATCHDOG = (1, -signal.SIGSEGV)

OPEN_TRANSACTION = """
select state_change from pg_stat_activity
 where application_name = 'acme_billing.work' and datname = current_database() and state = 'idle in transaction'
   and state_change < clock_timestamp() - interval '50 ms'
"""

pytestmark = pytest.mark.slow

Figures = dict[str, list[float]]


def wake(replica: Replica) -> None:
    """Let a process go on that is past its deadline: it dies by the watchdog, or its workers end in time."""
    before = replica.log.count("worker.stopped")
    replica.signal(signal.SIGCONT)
    wait_until(
        lambda: replica.process.poll() is not None or replica.log.count("worker.stopped") > before,
        5,
        lambda: f"it ends or stands by: {replica.log[-4000:]}",
    )
    if replica.process.poll() is None:
        replica.process.kill()  # so that the next trial begins with the same number of processes
        replica.process.wait()
    else:
        assert replica.process.returncode in WATCHDOG


def last_work_of(fleet: Fleet, replica: Replica) -> float:
    """When it did its last unit of work; a line that it had begun to write comes late, with the time of before."""
    return max(term.last for terms in fleet.report().terms.values() for term in terms if term.pid == replica.pid)


def test_a_leader_paused_between_two_units_of_work_does_no_other_when_it_wakes(fleet: Fleet, figures: Figures) -> None:
    for _ in range(3):
        leader, _ = fleet.line_up()
        at = time.monotonic()
        leader.signal(signal.SIGSTOP)
        for role, gap in fleet.succession(leader, at).items():
            figures[role].append(gap)
        woken_at = time.monotonic()
        wake(leader)
        assert last_work_of(fleet, leader) < woken_at
    for role, gaps in figures.items():
        assert max(gaps) < TTL + 2 * INTERVAL + SLACK, role
    fleet.assert_safe()


def test_a_leader_paused_in_the_middle_of_a_fenced_transaction_commits_nothing_when_it_wakes(
    fleet: Fleet, figures: Figures
) -> None:
    with fleet.postgres.connect() as conn:
        for _ in range(3):
            leader, standby = fleet.line_up(roles=("poller",))
            hold = fleet.directory / "hold"
            hold.touch()
            wait_until(lambda: conn.execute(OPEN_TRANSACTION).fetchone(), 5, "a transaction is kept open")
            before = conn.execute("select max(epoch), count(*) from public.fenced_writes").fetchone() or (0, 0)
            at = time.monotonic()
            leader.signal(signal.SIGSTOP)
            hold.unlink()
            figures["poller"].append(fleet.succession(leader, at)["poller"])
            assert fleet.leader("poller") is standby
            wake(leader)
            assert (
                before
                == conn.execute(
                    "select max(epoch), count(*) from public.fenced_writes where epoch <= %s", [before[0]]
                ).fetchone()
            )
    assert max(figures["poller"]) < TTL + 2 * INTERVAL + SLACK
    fleet.assert_safe()


def test_a_pause_shorter_than_the_lease_lasts_changes_nothing(fleet: Fleet) -> None:
    leader, _ = fleet.line_up(environment=QUICK | {"TTL_SECONDS": "6"})
    for _ in range(3):
        leader.signal(signal.SIGSTOP)
        throughout(INTERVAL, lambda: len(fleet.report().terms["scheduler"]) == 1, "nobody else works")
        leader.signal(signal.SIGCONT)
        wait_until(lambda: fleet.leader("scheduler") is leader, 2, "the leader works again")
    report = fleet.assert_safe()
    assert all(len(terms) == 1 for terms in report.terms.values()), "no term ended"
    assert fleet.stop() == [0, 0]
