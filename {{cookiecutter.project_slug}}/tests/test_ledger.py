import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row

from {{cookiecutter.project_slug}} import Lease, LeaseLost, ledger
from {{cookiecutter.project_slug}}.keys import SERVICE, LeaseKey

ROLE = next(iter(LeaseKey)).role
ROW = "select state, attempt, role, epoch, instance, error from {{cookiecutter.project_slug}}.job_run where job = %s"
WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
MAKE_DUE = "update {{cookiecutter.project_slug}}.job_run set retry_at = now() where state = 'retry'"
HOUR = timedelta(hours=1)

MakeLease = Callable[[str, str], Lease]
Begin = Callable[[], Lease]


@pytest.fixture
def period(conn: psycopg.Connection) -> datetime:
    return ledger.now(conn).replace(minute=0, second=0, microsecond=0)


@pytest.fixture
def begin(make_lease: MakeLease, database_url: str) -> Begin:
    """Begins the next term of the role."""
    return lambda: make_lease(ROLE, database_url)


def row(conn: psycopg.Connection, job: str) -> tuple[object, ...] | None:
    return conn.execute(ROW, [job]).fetchone()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(url: str, name: str = "") -> psycopg.Connection:
    return psycopg.connect(url, autocommit=True, application_name=name)


def outside(url: str, instance: str) -> ledger.Outside:
    return ledger.Outside(connect(url), connect(url, f"{SERVICE} {instance}"), instance)


def raise_error(*_: object) -> None:
    raise RuntimeError("no answer")


# -- claims


def test_a_period_is_claimed_once_however_many_try(database_url: str, period: datetime) -> None:
    together = threading.Barrier(8)

    def machine(_: int) -> bool:
        with connect(database_url) as conn, conn.transaction():
            together.wait()
            return ledger.claim(conn, "invoices", period) is not None

    with ThreadPoolExecutor(8) as machines:
        assert sorted(machines.map(machine, range(8))) == [False] * 7 + [True]


def test_the_claim_and_the_effect_are_rolled_back_together_and_the_loser_gets_the_run(
    database_url: str, conn: psycopg.Connection, period: datetime
) -> None:
    def loser() -> ledger.Run | None:
        with connect(database_url) as other:
            return ledger.claim(other, "invoices", period)

    with ThreadPoolExecutor(1) as thread, connect(database_url) as winner:
        with winner.transaction(force_rollback=True):
            assert ledger.claim(winner, "invoices", period)
            lost = thread.submit(loser)
            wait_until(lambda: conn.execute(WAITING).fetchone() == (1,))
        assert lost.result(timeout=10)


def test_a_run_left_by_a_dead_leader_is_taken_over_at_once(
    conn: psycopg.Connection, period: datetime, begin: Begin
) -> None:
    first = begin()
    dead = ledger.start(conn, "mailing", period, first)
    assert dead
    assert ledger.start(conn, "mailing", period, first) is None
    assert ledger.claim(conn, "mailing", period) is None
    assert ledger.unfinished(conn, ["mailing"]) == []

    second = begin()
    assert ledger.unfinished(conn, ["mailing"]) == [("mailing", period)]
    run = ledger.start(conn, "mailing", period, second)
    assert run
    assert run.attempt == 2
    assert not ledger.finish(conn, dead)
    assert not ledger.fail(conn, dead, "too late")
    assert row(conn, "mailing") == ("running", 2, ROLE, second.epoch, "test", None)
    assert ledger.finish(conn, run)
    assert row(conn, "mailing") == ("succeeded", 2, ROLE, second.epoch, "test", None)
    assert ledger.start(conn, "mailing", period, begin()) is None


def test_a_run_from_outside_is_taken_over_as_soon_as_its_session_has_ended(
    conn: psycopg.Connection, period: datetime, begin: Begin, database_url: str
) -> None:
    machine = outside(database_url, "1-aa.0@cron")
    dead = ledger.start(machine.work, "mailing", period, machine)
    assert dead
    lease = begin()
    assert ledger.unfinished(conn, ["mailing"]) == []
    assert ledger.start(conn, "mailing", period, lease) is None
    machine.session.close()
    wait_until(lambda: ledger.unfinished(conn, ["mailing"]) != [])
    with pytest.raises(LeaseLost, match="the session that holds the job is gone"):
        machine.check()
    run = ledger.start(conn, "mailing", period, lease)
    assert run
    assert run.attempt == 2
    assert not ledger.finish(machine.work, dead)
    machine.work.close()


@pytest.mark.parametrize("transactional", [True, False])
def test_a_failed_run_is_repeated_when_its_retry_is_due_and_then_stays_failed(
    conn: psycopg.Connection, period: datetime, begin: Begin, transactional: bool
) -> None:
    lease = begin()

    def attempt() -> ledger.Run | None:
        if not transactional:
            return ledger.start(conn, "mailing", period, lease)
        with conn.transaction(force_rollback=True):
            return ledger.claim(conn, "mailing", period, lease)

    first = attempt()
    assert first
    assert ledger.fail(conn, first, "no answer", retry_in=HOUR)
    assert row(conn, "mailing") == ("retry", 1, ROLE, lease.epoch, "test", "no answer")
    assert attempt() is None
    assert ledger.unfinished(conn, ["mailing"]) == []

    conn.execute(MAKE_DUE)
    assert ledger.unfinished(conn, ["mailing"]) == [("mailing", period)]
    second = attempt()
    assert second
    assert second.attempt == 2
    assert ledger.fail(conn, second, "still no answer")
    assert row(conn, "mailing") == ("failed", 2, ROLE, lease.epoch, "test", "still no answer")
    assert attempt() is None
    assert ledger.unfinished(conn, ["mailing"]) == []


def test_force_runs_whatever_is_on_record(conn: psycopg.Connection, period: datetime) -> None:
    for attempt in (1, 2):
        run = ledger.claim(conn, "invoices", period, force=True)
        assert run
        assert run.attempt == attempt
    assert ledger.claim(conn, "invoices", period) is None


def test_times_are_those_of_the_database_in_utc(database_url: str, period: datetime) -> None:
    with psycopg.connect(database_url, autocommit=True, options="-c timezone=Asia/Kathmandu") as conn:
        run = ledger.claim(conn, "invoices", period)
        assert run
        assert run.period == period
        assert {run.period.tzinfo, run.started_at.tzinfo, ledger.now(conn).tzinfo} == {UTC}
        assert ledger.last_periods(conn, ["invoices", "new"]) == {"invoices": period, "new": None}
        (past,) = ledger.history(conn, "invoices")
        assert (past.period, past.period.tzinfo) == (period, UTC)


def test_the_callers_row_factory_does_not_matter(database_url: str, period: datetime) -> None:
    with psycopg.Connection[DictRow].connect(database_url, autocommit=True, row_factory=dict_row) as conn:
        assert ledger.claim(conn, "invoices", period)
        assert ledger.last_periods(conn, ["invoices"]) == {"invoices": period}
        assert [status.job for status in ledger.last_runs(conn)] == ["invoices"]


def test_a_skipped_period_never_runs_and_skipping_never_undoes_a_run(
    conn: psycopg.Connection, period: datetime
) -> None:
    ledger.skip(conn, "invoices", period)
    assert ledger.claim(conn, "invoices", period) is None
    assert ledger.last_periods(conn, ["invoices"]) == {"invoices": period}
    assert ledger.claim(conn, "mailing", period)
    ledger.skip(conn, "mailing", period)
    assert row(conn, "mailing") == ("succeeded", 1, None, None, None, None)


def test_a_period_that_cannot_be_judged_is_refused_with_the_reason(conn: psycopg.Connection) -> None:
    now = ledger.now(conn)
    with pytest.raises(ledger.Refused, match="'invoices' needs a time zone"):
        ledger.claim(conn, "invoices", now.replace(tzinfo=None))
    with pytest.raises(ledger.Refused, match="cannot run early"):
        ledger.claim(conn, "invoices", now + timedelta(minutes=1))
    with pytest.raises(ledger.Refused, match="cannot run early"):
        ledger.claim(conn, "invoices", now + timedelta(minutes=1), force=True)
    with pytest.raises(ledger.Refused, match="more than 90 days old"):
        ledger.claim(conn, "invoices", now - timedelta(days=91))
    assert row(conn, "invoices") is None


# -- runs with attempts


def test_what_runs_once_leaves_no_effect_when_it_fails_and_is_tried_until_it_has_failed_for_good(
    conn: psycopg.Connection, period: datetime, begin: Begin
) -> None:
    conn.execute("create table effect (n integer)")
    lease = begin()

    def work(conn: psycopg.Connection, run: ledger.Run) -> None:
        conn.execute("insert into effect values (1)")
        raise RuntimeError("no paper")

    first = ledger.run_once(lease, "invoices", period, work, attempts=2)
    assert first
    assert first.retry_in
    assert 15 <= first.retry_in.total_seconds() <= 45
    assert ledger.run_once(lease, "invoices", period, work, attempts=2) is None
    conn.execute(MAKE_DUE)
    second = ledger.run_once(lease, "invoices", period, work, attempts=2)
    assert second
    assert second.retry_in is None
    assert row(conn, "invoices") == ("failed", 2, ROLE, lease.epoch, "test", "RuntimeError: no paper")
    assert conn.execute("select from effect").fetchall() == []


def test_what_runs_at_least_once_is_on_record_as_running_meanwhile(
    conn: psycopg.Connection, period: datetime, begin: Begin
) -> None:
    seen: list[object] = []
    outcome = ledger.run(begin(), "mailing", period, lambda run: seen.append(row(conn, "mailing")))
    assert outcome
    assert outcome.error is None
    assert seen == [("running", 1, ROLE, 1, "test", None)]
    assert row(conn, "mailing") == ("succeeded", 1, ROLE, 1, "test", None)


def test_a_run_whose_leaders_die_is_tried_a_bounded_number_of_times(
    conn: psycopg.Connection, period: datetime, begin: Begin
) -> None:
    def die(run: ledger.Run) -> None:
        raise LeaseLost("killed")

    for _ in range(2):
        with pytest.raises(LeaseLost):
            ledger.run(begin(), "mailing", period, die, attempts=2)
    assert ledger.run(begin(), "mailing", period, lambda run: pytest.fail("ran"), attempts=2)
    state, attempt, *_, error = row(conn, "mailing") or ()
    assert (state, attempt, error) == ("failed", 3, "RuntimeError: whoever ran it died, each time")


def test_a_job_never_runs_beside_another_period_of_itself(
    conn: psycopg.Connection, period: datetime, begin: Begin, database_url: str
) -> None:
    lease, machine = begin(), outside(database_url, "1-aa.0@cron")
    assert ledger.start(conn, "mailing", period - HOUR, lease)
    for runner in (lease, machine):
        assert ledger.run(runner, "mailing", period, raise_error) is None
        assert ledger.run_once(runner, "mailing", period, raise_error) is None
    assert ledger.run(begin(), "mailing", period, lambda run: None)  # its leader is dead

    machine.session.execute("select pg_advisory_lock(%s)", [ledger.lock_key("invoices")])
    assert ledger.run_once(begin(), "invoices", period, raise_error) is None
    assert ledger.run_once(machine, "invoices", period, lambda conn, run: None)
    machine.session.close()
    machine.work.close()


@pytest.mark.slow
def test_an_end_is_recorded_once_the_database_is_back(
    conn: psycopg.Connection, period: datetime, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = begin()
    transaction = lease.transaction

    def away() -> AbstractContextManager[psycopg.Connection]:
        monkeypatch.setattr(lease, "transaction", transaction)
        raise psycopg.OperationalError("the server is away")

    def work(run: ledger.Run) -> None:
        monkeypatch.setattr(lease, "transaction", away)

    assert ledger.run(lease, "mailing", period, work)
    assert row(conn, "mailing") == ("succeeded", 1, ROLE, lease.epoch, "test", None)


# -- what has run


def test_last_run_last_success_and_what_is_overdue_are_one_query_away(
    conn: psycopg.Connection, period: datetime, begin: Begin
) -> None:
    lease = begin()
    ledger.plan(
        conn, ROLE, {"gone": ("every 1h", period), "late": ("every 1h", period), "new": ("every 1h", period + HOUR)}
    )
    ledger.plan(conn, ROLE, {"late": ("every 1h", period), "new": ("every 2h", period + 2 * HOUR)}, forget=True)
    ledger.plan(conn, "another", {"other": ("0 2 * * * UTC", period + HOUR)})
    assert ledger.run(lease, "late", period - 2 * HOUR, lambda run: None)
    assert ledger.run(lease, "late", period - HOUR, raise_error, attempts=1)
    assert ledger.claim(conn, "undeclared", period)
    ledger.skip(conn, "new", period)

    late, new, other, undeclared = ledger.last_runs(conn)
    assert [status.job for status in (late, new, other, undeclared)] == ["late", "new", "other", "undeclared"]
    assert (late.schedule, late.next_period, late.state) == ("every 1h", period, "failed")
    assert (late.period, late.attempt, late.error) == (period - HOUR, 1, "RuntimeError: no answer")
    assert (late.success_period, late.instance) == (period - 2 * HOUR, "test")
    assert late.overdue_seconds is not None
    assert 0 < late.overdue_seconds <= 3700
    assert late.success_age_seconds is not None
    assert (new.schedule, new.next_period, new.period) == ("every 2h", period + 2 * HOUR, None)
    assert (new.overdue_seconds, other.overdue_seconds) == (None, None)
    assert (undeclared.schedule, undeclared.next_period, undeclared.state) == (None, None, "succeeded")


def test_the_names_are_found_without_reading_every_row(conn: psycopg.Connection) -> None:
    conn.execute(
        """
        insert into {{cookiecutter.project_slug}}.job_run (job, period, state)
        select job, now() - n * interval '1 minute', 'succeeded'
        from generate_series(1, 20000) as n, unnest(array['a', 'b', 'c']) as job
        """
    )
    conn.execute("vacuum analyze {{cookiecutter.project_slug}}.job_run")
    assert [status.job for status in ledger.last_runs(conn)] == ["a", "b", "c"]
    plan = "\n".join(line for (line,) in conn.execute(f"explain {ledger.statements.LAST_RUNS}"))
    assert "Seq Scan on job_run" not in plan


def test_history_is_told_latest_first(conn: psycopg.Connection, period: datetime, begin: Begin) -> None:
    lease = begin()
    for hours in (3, 2, 1):
        assert ledger.run_once(lease, "invoices", period - hours * HOUR, lambda conn, run: None)
    assert [past.period for past in ledger.history(conn, "invoices", limit=2)] == [period - HOUR, period - 2 * HOUR]
    (past,) = ledger.history(conn, "invoices", period=period - 3 * HOUR)
    assert (past.state, past.attempt, past.epoch, past.instance) == ("succeeded", 1, lease.epoch, "test")
    assert past.seconds is not None
    assert ledger.history(conn, "unknown") == []
