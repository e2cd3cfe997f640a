import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Literal

import psycopg
import pytest
from structlog.testing import capture_logs

from {{cookiecutter.project_slug}} import Lease, LeaseLost, Worker, ledger
from {{cookiecutter.project_slug}}_scheduler import worker
from {{cookiecutter.project_slug}}_scheduler.job import JOBS, Run, job
from {{cookiecutter.project_slug}}_scheduler.scheduler import Scheduler

MakeLease = Callable[[str, str], Lease]
Leading = Callable[[Worker, Lease], AbstractContextManager[None]]
Settle = Callable[[Lease], None]
Effect = Callable[[], list[str]]

RUNS = "select job, state, attempt, error from {{cookiecutter.project_slug}}.job_run where state <> 'skipped' order by period"
# as if that much time had passed since
LET_PASS = "update {{cookiecutter.project_slug}}.job_run set period = period - %s::interval"
MAKE_DUE = "update {{cookiecutter.project_slug}}.job_run set retry_at = now() where state = 'retry'"
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _no_jobs() -> Iterator[None]:
    declared = dict(JOBS)
    JOBS.clear()
    yield
    JOBS.clear()
    JOBS.update(declared)


@pytest.fixture
def effect(conn: psycopg.Connection) -> Effect:
    """A table for effects of jobs; returns the names in it."""
    conn.execute("create table public.effect (name text)")
    return lambda: [name for (name,) in conn.execute("select name from public.effect")]


@pytest.fixture
def lease(make_lease: MakeLease, database_url: str) -> Lease:
    return make_lease("scheduler", database_url)


@pytest.fixture
def settle() -> Settle:
    """`settle(lease)` runs everything that is due in that term, to its end."""

    def one(lease: Lease) -> None:
        with Scheduler(lease, JOBS) as scheduler:
            scheduler.look()
            while scheduler.running:
                assert not wait(scheduler.running.values(), timeout=20).not_done
                scheduler.look()

    return one


def runs(conn: psycopg.Connection) -> list[tuple[object, ...]]:
    return conn.execute(RUNS).fetchall()


def hours_ago(conn: psycopg.Connection, count: int) -> list[object]:
    hour = ledger.now(conn).replace(minute=0, second=0, microsecond=0)
    return [hour - n * HOUR for n in range(count)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- which periods


def test_a_new_job_starts_from_now_and_then_runs_once_per_period(
    conn: psycopg.Connection, lease: Lease, settle: Settle
) -> None:
    ran: list[Run] = []
    job("hourly", every="1h")(lambda conn, run: ran.append(run))
    for _ in range(3):
        settle(lease)
    assert ran == []
    conn.execute(LET_PASS, ["1 hour"])
    for _ in range(3):
        settle(lease)
    assert [run.period for run in ran] == hours_ago(conn, 1)
    assert runs(conn) == [("hourly", "succeeded", 1, None)]


@pytest.mark.parametrize(
    ("catch_up", "limit", "periods"), [("latest", 100, 1), ("skip", 100, 0), ("all", 100, 5), ("all", 2, 2)]
)
def test_what_was_missed_is_caught_up_with_as_declared_oldest_first(
    conn: psycopg.Connection,
    lease: Lease,
    settle: Settle,
    monkeypatch: pytest.MonkeyPatch,
    catch_up: Literal["latest", "skip", "all"],
    limit: int,
    periods: int,
) -> None:
    monkeypatch.setattr("{{cookiecutter.project_slug}}_scheduler.scheduler.PUNCTUAL", timedelta(0))
    ran: list[Run] = []
    job("hourly", every="1h", catch_up=catch_up, catch_up_limit=limit)(lambda conn, run: ran.append(run))
    settle(lease)
    conn.execute(LET_PASS, ["5 hours"])
    settle(lease)
    settle(lease)
    assert [run.period for run in ran] == hours_ago(conn, periods)[::-1]
    # and nothing of it later on
    assert ledger.last_periods(conn, ["hourly"]) == {"hourly": hours_ago(conn, 1)[0]}


def test_skipping_is_for_what_is_late_not_for_what_a_takeover_delayed(
    conn: psycopg.Connection, lease: Lease, settle: Settle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("{{cookiecutter.project_slug}}_scheduler.scheduler.PUNCTUAL", HOUR)
    ran: list[Run] = []
    job("hourly", every="1h", catch_up="skip")(lambda conn, run: ran.append(run))
    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    settle(lease)
    assert len(ran) == 1


def test_after_months_only_what_is_still_on_record_is_caught_up_with(
    conn: psycopg.Connection, lease: Lease, settle: Settle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Run] = []
    job("daily", every="1d", catch_up="all", catch_up_limit=1000)(lambda conn, run: ran.append(run))
    settle(lease)
    conn.execute(LET_PASS, ["400 days"])
    settle(lease)
    assert len(ran) == ledger.MEMORY.days
    monkeypatch.setattr(ledger, "MEMORY", timedelta(0))
    job("hourly", every="1h")(lambda conn, run: pytest.fail("ran"))
    settle(lease)
    conn.execute(LET_PASS + " where job = 'hourly'", ["1 hour"])
    settle(lease)


@pytest.mark.slow
def test_nothing_runs_early(conn: psycopg.Connection, lease: Lease) -> None:
    ran: list[float] = []
    job("each_second", every="1s")(lambda conn, run: ran.append((ledger.now(conn) - run.period).total_seconds()))
    with Scheduler(lease, JOBS) as scheduler:
        while len(ran) < 3:
            pause = scheduler.look()
            assert 0 <= pause <= 1
            time.sleep(pause)
    assert min(ran) >= 0


# -- how often one is tried


def test_a_transactional_job_that_fails_leaves_no_effect_is_repeated_and_then_stays_failed(
    conn: psycopg.Connection, lease: Lease, settle: Settle, effect: Effect
) -> None:
    @job("bad", every="1h", attempts=2)
    def bad(conn: psycopg.Connection, run: Run) -> None:
        conn.execute("insert into public.effect (name) values ('half')")
        raise RuntimeError("no paper")

    ran: list[Run] = []
    job("good", every="1h")(lambda conn, run: ran.append(run))
    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    settle(lease)
    assert ("bad", "retry", 1, "RuntimeError: no paper") in runs(conn)
    conn.execute(MAKE_DUE)
    settle(lease)
    assert ("bad", "failed", 2, "RuntimeError: no paper") in runs(conn)
    settle(lease)
    assert len(ran) == 1
    assert effect() == []


def test_a_job_whose_leader_died_is_repeated_at_once_by_the_next_but_not_for_ever(
    conn: psycopg.Connection, make_lease: MakeLease, database_url: str, settle: Settle
) -> None:
    attempts: list[int] = []

    @job("mailing", every="1h", transactional=False, attempts=2)
    def mailing(run: Run) -> None:
        attempts.append(run.attempt)
        raise LeaseLost("this leader dies")

    settle(make_lease("scheduler", database_url))
    conn.execute(LET_PASS, ["1 hour"])
    for _ in range(2):
        settle(make_lease("scheduler", database_url))
    assert runs(conn) == [("mailing", "running", 2, None)]
    settle(make_lease("scheduler", database_url))
    assert runs(conn) == [("mailing", "failed", 3, "RuntimeError: whoever ran it died, each time")]
    assert attempts == [1, 2]


@pytest.mark.parametrize("statement", ["select pg_sleep(60)", "select"])
def test_a_transactional_job_out_of_time_is_rolled_back_as_a_failed_attempt(
    conn: psycopg.Connection, lease: Lease, settle: Settle, effect: Effect, statement: str
) -> None:
    @job("slow", every="1h", timeout_seconds=0.2)
    def slow(conn: psycopg.Connection, run: Run) -> None:
        conn.execute("insert into public.effect (name) values ('half')")
        conn.execute(statement)
        time.sleep(0.3)

    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    settle(lease)
    assert runs(conn) == [("slow", "retry", 1, "TimeoutError: took longer than timeout_seconds=0.2")]
    assert effect() == []


def test_another_job_out_of_time_is_told_when_it_asks_and_is_heard_of_when_it_does_not(
    conn: psycopg.Connection, lease: Lease, settle: Settle
) -> None:
    @job("slow", every="1h", transactional=False, timeout_seconds=0.1)
    def slow(run: Run) -> None:
        time.sleep(0.3)
        run.check()

    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    with capture_logs() as logs:
        settle(lease)
    assert [entry["event"] for entry in logs] == ["job.overdue", "job.failed"]
    assert runs(conn) == [("slow", "retry", 1, "TimeoutError: took longer than timeout_seconds=0.1")]


# -- beside each other


def test_jobs_do_not_wait_for_each_other(conn: psycopg.Connection, lease: Lease, settle: Settle) -> None:
    together = threading.Barrier(3, timeout=10)
    for name in ("one", "two", "three"):
        job(name, every="1h")(lambda conn, run: together.wait())
    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    settle(lease)
    assert [state for _, state, *_ in runs(conn)] == ["succeeded"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("transactional", [True, False])
def test_a_job_longer_than_its_period_neither_overlaps_itself_nor_piles_up(
    conn: psycopg.Connection, lease: Lease, transactional: bool
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    ran: list[Run] = []

    def long(run: Run) -> None:
        ran.append(run)
        begun.release()
        assert may_end.wait(20)

    if transactional:
        job("long", every="1s")(lambda conn, run: long(run))
    else:
        job("long", every="1s", transactional=False)(long)
    with Scheduler(lease, JOBS) as scheduler:
        while not ran:
            time.sleep(scheduler.look())
        until = ledger.now(conn) + timedelta(seconds=2.5)
        while ledger.now(conn) < until:
            assert scheduler.look() <= 1
        assert len(ran) == 1
        (status,) = ledger.last_runs(conn)
        assert status.overdue_seconds is not None
        assert status.overdue_seconds > 1
        may_end.set()
        scheduler.running["long"].result(timeout=10)
        scheduler.look()
        assert begun.acquire(timeout=10)
        assert begun.acquire(timeout=10)
        assert ran[1].period - ran[0].period >= timedelta(seconds=2)
        assert ran[1].period >= until - timedelta(seconds=1)


def test_the_number_of_jobs_at_once_is_bounded(conn: psycopg.Connection, lease: Lease, settle: Settle) -> None:
    at_once: list[int] = []
    now = threading.Semaphore(0)

    def work(run: Run) -> None:
        now.release()
        time.sleep(0.05)
        at_once.append(now._value)
        now.acquire()

    for number in range(8):
        job(f"job_{number}", every="1h", transactional=False)(work)
    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    settle(lease)
    assert len(at_once) == 8
    assert max(at_once) <= 4


def test_a_run_from_outside_holds_the_leader_back(
    conn: psycopg.Connection, lease: Lease, settle: Settle, database_url: str, effect: Effect
) -> None:
    job("invoices", every="1h")(lambda conn, run: conn.execute("insert into effect (name) values ('x')"))
    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("select pg_advisory_lock(%s)", [ledger.lock_key("invoices")])
        with Scheduler(lease, JOBS) as scheduler:
            scheduler.look()
            scheduler.running["invoices"].result(timeout=10)
            assert effect() == []
            other.execute("select pg_advisory_unlock_all()")
            scheduler.look()
            scheduler.running["invoices"].result(timeout=10)
    assert effect() == ["x"]


# -- when the term ends, or the database is away


def test_a_leader_that_lost_its_lease_runs_nothing(
    conn: psycopg.Connection, lease: Lease, make_lease: MakeLease, database_url: str, settle: Settle
) -> None:
    ran: list[Run] = []
    job("hourly", every="1h")(lambda conn, run: ran.append(run))
    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    make_lease("scheduler", database_url)
    with pytest.raises(LeaseLost):
        settle(lease)
    assert ran == []


def test_asked_to_stop_it_lets_a_transaction_end_and_tells_the_others(
    conn: psycopg.Connection, lease: Lease, settle: Settle, leading: Leading, effect: Effect
) -> None:
    begun = threading.Barrier(3, timeout=10)

    @job("invoices", every="1h")
    def invoices(conn: psycopg.Connection, run: Run) -> None:
        begun.wait()
        wait_until(lambda: lease.stopping)
        conn.execute("insert into public.effect (name) values ('invoice')")

    @job("mailing", every="1h", transactional=False)
    def mailing(run: Run) -> None:
        begun.wait()
        while True:
            run.check()
            time.sleep(0.01)

    settle(lease)
    conn.execute(LET_PASS, ["1 hour"])
    with leading(worker, lease):
        begun.wait()
    assert effect() == ["invoice"]
    assert {(job, state) for job, state, *_ in runs(conn)} == {("invoices", "succeeded"), ("mailing", "running")}


def test_without_a_free_connection_it_goes_on_later(
    conn: psycopg.Connection, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted() -> AbstractContextManager[psycopg.Connection]:
        raise psycopg.OperationalError("couldn't get a connection after 5.00 sec")

    job("hourly", every="1h")(lambda conn, run: None)
    with Scheduler(lease, JOBS) as scheduler, capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr(lease, "transaction", exhausted)
            assert scheduler.look() == 1
        assert scheduler.look() > 0
    assert [entry["event"] for entry in logs] == ["scheduler.delayed"]


@pytest.mark.slow
def test_jobs_run_when_planned_while_it_leads(lease: Lease, leading: Leading) -> None:
    twice = threading.Semaphore(0)
    job("each_second", every="1s")(lambda conn, run: twice.release())
    with leading(worker, lease):
        assert twice.acquire(timeout=10)
        assert twice.acquire(timeout=10)


# -- what is on record of it


def test_what_is_declared_is_published_with_its_next_planned_time(
    conn: psycopg.Connection, lease: Lease, settle: Settle
) -> None:
    job("daily", cron="0 2 * * *", tz="Europe/Berlin")(lambda conn, run: None)
    job("hourly", every="1h")(lambda conn, run: None)
    settle(lease)
    daily, hourly = ledger.last_runs(conn)
    assert (daily.schedule, hourly.schedule) == ("0 2 * * * Europe/Berlin", "every 1h")
    assert daily.next_period == JOBS["daily"].schedule.next(ledger.now(conn))
    assert (daily.overdue_seconds, hourly.overdue_seconds) == (None, None)
    del JOBS["daily"]
    settle(lease)
    assert [(status.job, status.schedule) for status in ledger.last_runs(conn)] == [
        ("daily", None),
        ("hourly", "every 1h"),
    ]


def test_a_job_that_is_wrong_is_refused_with_its_name() -> None:
    job("invoices", every="1h")(lambda conn, run: None)
    with pytest.raises(ValueError, match="job 'invoices': is declared twice"):
        job("invoices", every="1h")
    wrongs: list[tuple[Callable[[], object], str]] = [
        (lambda: job("mailing", cron="0 2 x"), "cron='0 2 x' is no cron expression"),
        (lambda: job("mailing", cron="0 0 */40 2 MON#5"), "never fires"),
        (lambda: job("mailing", every="1h", attempts=0), "attempts=0 must be at least 1"),
        (lambda: job("mailing", every="1h", catch_up="none"), "catch_up='none' is none of 'latest', 'skip', 'all'"),  # type: ignore[call-overload]
        (lambda: job("mailing", every="1h", catch_up="all", catch_up_limit=0), "catch_up_limit=0"),
        (lambda: job("mailing", every="1h", timeout_seconds=0), "timeout_seconds=0 leaves it no time"),
        (lambda: job("mailing", every="1h")(lambda run: None), r"takes \(conn, run\), not <lambda>\(run\)"),  # type: ignore[arg-type,misc]
    ]
    for wrong, message in wrongs:
        with pytest.raises(ValueError, match=f"job 'mailing'.*{message}"):
            wrong()

    async def mailing(run: Run) -> None: ...

    with pytest.raises(ValueError, match="it must be a plain function"):
        job("mailing", every="1h", transactional=False)(mailing)
