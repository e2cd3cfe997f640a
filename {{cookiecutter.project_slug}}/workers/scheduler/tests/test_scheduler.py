import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import psycopg
import pytest

from {{cookiecutter.project_slug}} import Lease, LeaseLost, Worker, ledger
from {{cookiecutter.project_slug}}.ledger import Run
from {{cookiecutter.project_slug}}_scheduler import scheduler, worker
from {{cookiecutter.project_slug}}_scheduler.scheduler import job

MakeLease = Callable[[str, str], Lease]
Leading = Callable[[Worker, Lease], AbstractContextManager[None]]

RUNS = """
select job, state, attempt, error from {{cookiecutter.project_slug}}.job_run where state <> 'skipped' order by period
"""
# as if that much time had passed since
LET_PASS = "update {{cookiecutter.project_slug}}.job_run set period = period - %s::interval"
MAKE_DUE = "update {{cookiecutter.project_slug}}.job_run set retry_at = now() where state = 'retry'"


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch, conn: psycopg.Connection) -> None:
    conn.execute("create table effect (name text)")
    monkeypatch.setattr(scheduler, "JOBS", {})


@pytest.fixture
def lease(make_lease: MakeLease, database_url: str) -> Lease:
    return make_lease("scheduler", database_url)


def let_pass(conn: psycopg.Connection, time: str) -> None:
    conn.execute(LET_PASS, [time])


def runs(conn: psycopg.Connection) -> list[tuple[object, ...]]:
    return conn.execute(RUNS).fetchall()


def test_a_new_job_starts_from_now_and_then_runs_once_per_period(conn: psycopg.Connection, lease: Lease) -> None:
    ran: list[Run] = []
    job("hourly", every="1h")(lambda conn, run: ran.append(run))
    for _ in range(3):
        assert 0 < scheduler.tick(lease) <= scheduler.LONGEST_PAUSE_SECONDS
    assert ran == []
    let_pass(conn, "1 hour")
    for _ in range(3):
        scheduler.tick(lease)
    assert [run.period for run in ran] == [ledger.now(conn).replace(minute=0, second=0, microsecond=0)]
    assert runs(conn) == [("hourly", "succeeded", 1, None)]


def test_after_downtime_the_latest_period_runs_and_no_other(conn: psycopg.Connection, lease: Lease) -> None:
    ran: list[Run] = []
    job("hourly", every="1h")(lambda conn, run: ran.append(run))
    scheduler.tick(lease)
    let_pass(conn, "100 days")
    while scheduler.tick(lease) == 0:
        pass
    assert len(ran) == 1


def test_a_planned_time_that_is_no_longer_on_record_is_not_caught_up_with(
    conn: psycopg.Connection, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MEMORY", ledger.MEMORY * 0)
    job("hourly", every="1h")(lambda conn, run: pytest.fail("ran"))
    scheduler.tick(lease)
    let_pass(conn, "1 hour")
    assert scheduler.tick(lease) > 0
    assert runs(conn) == []


def test_a_transactional_job_that_fails_leaves_no_effect_is_repeated_and_then_stays_failed(
    conn: psycopg.Connection, lease: Lease
) -> None:
    @job("bad", every="1h", attempts=2)
    def bad(conn: psycopg.Connection, run: Run) -> None:
        conn.execute("insert into effect values ('half')")
        raise RuntimeError("no paper")

    ran: list[Run] = []
    job("good", every="1h")(lambda conn, run: ran.append(run))
    scheduler.tick(lease)
    let_pass(conn, "1 hour")
    scheduler.tick(lease)
    assert scheduler.tick(lease) > 0
    assert ("bad", "retry", 1, "RuntimeError: no paper") in runs(conn)
    conn.execute(MAKE_DUE)
    scheduler.tick(lease)
    assert ("bad", "failed", 2, "RuntimeError: no paper") in runs(conn)
    assert scheduler.tick(lease) > 0
    assert len(ran) == 1
    assert conn.execute("select count(*) from effect").fetchone() == (0,)


def test_a_job_whose_leader_died_is_repeated_at_once_by_the_next_but_not_for_ever(
    conn: psycopg.Connection, make_lease: MakeLease, database_url: str
) -> None:
    attempts: list[int] = []

    @job("mailing", every="1h", transactional=False, attempts=2)
    def mailing(lease: Lease, run: Run) -> None:
        attempts.append(run.attempt)
        raise LeaseLost("this leader dies")

    scheduler.tick(make_lease("scheduler", database_url))
    let_pass(conn, "1 hour")
    for _ in range(2):
        with pytest.raises(LeaseLost):
            scheduler.tick(make_lease("scheduler", database_url))
    assert runs(conn) == [("mailing", "running", 2, None)]
    scheduler.tick(make_lease("scheduler", database_url))
    assert runs(conn) == [("mailing", "failed", 3, "RuntimeError: every attempt ended with its leader")]
    assert attempts == [1, 2]


def test_a_leader_that_lost_its_lease_runs_nothing(
    conn: psycopg.Connection, lease: Lease, make_lease: MakeLease, database_url: str
) -> None:
    ran: list[Run] = []
    job("hourly", every="1h")(lambda conn, run: ran.append(run))
    scheduler.tick(lease)
    let_pass(conn, "1 hour")
    make_lease("scheduler", database_url)
    with pytest.raises(LeaseLost):
        scheduler.tick(lease)
    assert ran == []


def test_jobs_run_when_planned_while_it_leads(lease: Lease, leading: Leading) -> None:
    twice = threading.Semaphore(0)
    job("each_second", every="1s")(lambda conn, run: twice.release())
    with leading(worker, lease):
        assert twice.acquire(timeout=10)
        assert twice.acquire(timeout=10)


def test_a_job_that_is_wrong_is_refused_with_its_name() -> None:
    job("invoices", every="1h")(lambda conn, run: None)
    with pytest.raises(ValueError, match="job 'invoices' is declared twice"):
        job("invoices", every="1h")
    with pytest.raises(ValueError, match="job 'mailing': cron='0 2 x' is no cron expression"):
        job("mailing", cron="0 2 x")
    with pytest.raises(ValueError, match="job 'mailing' needs at least one attempt"):
        job("mailing", every="1h", attempts=0)
