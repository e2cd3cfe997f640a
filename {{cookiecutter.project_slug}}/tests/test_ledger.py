import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row

from {{cookiecutter.project_slug}} import ledger

ROW = "select state, attempt, role, epoch, instance, error from {{cookiecutter.project_slug}}.job_run where job = %s"
WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
MAKE_DUE = "update {{cookiecutter.project_slug}}.job_run set retry_at = now()"


@dataclass(frozen=True)
class Leader:
    epoch: int
    role: str = "mailer"
    instance: str = "host-1-abcdef"


@pytest.fixture
def period(conn: psycopg.Connection) -> datetime:
    return ledger.now(conn).replace(minute=0, second=0, microsecond=0)


def row(conn: psycopg.Connection, job: str) -> tuple[object, ...] | None:
    return conn.execute(ROW, [job]).fetchone()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(url: str) -> psycopg.Connection:
    return psycopg.connect(url, autocommit=True)


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


def test_a_run_left_by_a_dead_leader_is_taken_over_at_once(conn: psycopg.Connection, period: datetime) -> None:
    dead = ledger.start(conn, "mailing", period, Leader(epoch=1))
    assert dead
    assert ledger.start(conn, "mailing", period, Leader(epoch=1)) is None
    assert ledger.start(conn, "mailing", period, Leader(epoch=9, role="another")) is None
    assert ledger.unfinished(conn, ["mailing"], Leader(epoch=1)) == []
    assert ledger.unfinished(conn, ["mailing"], Leader(epoch=2)) == [("mailing", period)]

    run = ledger.start(conn, "mailing", period, Leader(epoch=2))
    assert run
    assert run.attempt == 2
    assert not ledger.finish(conn, dead)
    assert not ledger.fail(conn, dead, "too late")
    assert row(conn, "mailing") == ("running", 2, "mailer", 2, "host-1-abcdef", None)
    assert ledger.finish(conn, run)
    assert row(conn, "mailing") == ("succeeded", 2, "mailer", 2, "host-1-abcdef", None)
    assert ledger.start(conn, "mailing", period, Leader(epoch=3)) is None


@pytest.mark.parametrize("transactional", [True, False])
def test_a_failed_run_is_repeated_when_its_retry_is_due_and_then_stays_failed(
    conn: psycopg.Connection, period: datetime, transactional: bool
) -> None:
    def attempt(leader: Leader) -> ledger.Run | None:
        if not transactional:
            return ledger.start(conn, "mailing", period, leader)
        with conn.transaction(force_rollback=True):
            return ledger.claim(conn, "mailing", period, leader)

    first = attempt(Leader(epoch=1))
    assert first
    assert ledger.fail(conn, first, "no answer", retry_in=timedelta(hours=1))
    assert row(conn, "mailing") == ("retry", 1, "mailer", 1, "host-1-abcdef", "no answer")
    assert attempt(Leader(epoch=2)) is None
    assert ledger.unfinished(conn, ["mailing"], Leader(epoch=2)) == []

    conn.execute(MAKE_DUE)
    assert ledger.unfinished(conn, ["mailing"], Leader(epoch=2)) == [("mailing", period)]
    second = attempt(Leader(epoch=2))
    assert second
    assert second.attempt == 2
    assert ledger.fail(conn, second, "still no answer")
    assert row(conn, "mailing") == ("failed", 2, "mailer", 2, "host-1-abcdef", "still no answer")
    assert attempt(Leader(epoch=3)) is None
    assert ledger.unfinished(conn, ["mailing"], Leader(epoch=3)) == []


def test_times_are_those_of_the_database_in_utc(database_url: str, period: datetime) -> None:
    with psycopg.connect(database_url, autocommit=True, options="-c timezone=Asia/Kathmandu") as conn:
        run = ledger.claim(conn, "invoices", period)
        assert run
        assert run.period == period
        assert {run.period.tzinfo, run.started_at.tzinfo, ledger.now(conn).tzinfo} == {UTC}
        assert ledger.last_periods(conn, ["invoices", "new"]) == {"invoices": period, "new": None}


def test_the_callers_row_factory_does_not_matter(database_url: str, period: datetime) -> None:
    with psycopg.Connection[DictRow].connect(database_url, autocommit=True, row_factory=dict_row) as conn:
        assert ledger.claim(conn, "invoices", period)
        assert ledger.last_periods(conn, ["invoices"]) == {"invoices": period}


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
    with pytest.raises(ValueError, match="'invoices' needs a time zone"):
        ledger.claim(conn, "invoices", now.replace(tzinfo=None))
    with pytest.raises(ValueError, match="cannot run early"):
        ledger.claim(conn, "invoices", now + timedelta(minutes=1))
    with pytest.raises(ValueError, match="more than 90 days old"):
        ledger.claim(conn, "invoices", now - timedelta(days=91))
    assert row(conn, "invoices") is None
