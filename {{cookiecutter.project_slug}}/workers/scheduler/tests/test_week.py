"""A week of the scheduler on a real PostgreSQL whose clock is ours: the functions that tell the time are shadowed."""

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from {{cookiecutter.project_slug}} import Lease
from {{cookiecutter.project_slug}}_scheduler import scheduler
from {{cookiecutter.project_slug}}_scheduler.job import JOBS, Run, job
from {{cookiecutter.project_slug}}_scheduler.scheduler import Scheduler

pytestmark = pytest.mark.slow

CLOCK = """
create schema fake;
create table fake.clock as select timestamptz '2000-01-01' as time;
create function fake.clock_timestamp() returns timestamptz language sql volatile as 'select time from fake.clock';
create function fake.now() returns timestamptz language sql stable as 'select time from fake.clock';
"""
RUNS = "select job, period, state, attempt from {{cookiecutter.project_slug}}.job_run where state <> 'skipped' order by 1, 2"
WEEK = timedelta(days=7)
HOUR = timedelta(hours=1)

# Each week begins at midnight in UTC and has one change of the clocks in it. Then, for a job in the hour that is missing
# or comes twice: the times in UTC before the change, on its day, and after it.
WEEKS = [
    ("Europe/Berlin", "2026-03-26", "30 2 * * *", ["01:30"] * 3, "01:00", ["00:30"] * 3),
    ("Europe/Berlin", "2026-10-22", "30 2 * * *", ["00:30"] * 3, "00:30", ["01:30"] * 3),
    ("America/New_York", "2026-03-05", "30 2 * * *", ["07:30"] * 3, "07:00", ["06:30"] * 3),
    ("America/New_York", "2026-10-29", "30 1 * * *", ["05:30"] * 3, "05:30", ["06:30"] * 3),
    ("Australia/Lord_Howe", "2026-09-30", "15 2 * * *", ["15:45"] * 3, "15:30", ["15:15"] * 3),
    ("Australia/Lord_Howe", "2026-04-01", "45 1 * * *", ["14:45"] * 3, "14:45", ["15:15"] * 3),
]


@pytest.fixture(autouse=True)
def _no_jobs() -> Iterator[None]:
    declared = dict(JOBS)
    JOBS.clear()
    yield
    JOBS.clear()
    JOBS.update(declared)


@pytest.fixture
def set_clock(conn: psycopg.Connection, database_url: str) -> Callable[[datetime], object]:
    """Sets the clock of the database for every session that comes after this fixture."""
    conn.execute(CLOCK)
    conn.execute(
        f"alter database {conninfo_to_dict(database_url)['dbname']} set search_path = fake, pg_catalog, public"
    )
    return lambda time: conn.execute("update fake.clock set time = %s", [time])


@pytest.mark.parametrize(("zone", "first", "cron", "before", "on", "after"), WEEKS)
def test_a_week_in_which_the_clocks_change_has_exactly_the_periods_expected(
    conn: psycopg.Connection,
    database_url: str,
    set_clock: Callable[[datetime], object],
    make_lease: Callable[[str, str], Lease],
    monkeypatch: pytest.MonkeyPatch,
    zone: str,
    first: str,
    cron: str,
    before: list[str],
    on: str,
    after: list[str],
) -> None:
    monkeypatch.setattr(scheduler, "LONGEST_PAUSE_SECONDS", 7200.0)
    ran: list[tuple[str, datetime, datetime]] = []

    def record(run: Run) -> None:
        ran.append((run.job, run.period, now))

    job("daily", cron=cron, tz=zone)(lambda conn, run: record(run))
    if zone == "Europe/Berlin":
        job("hourly", cron="20 * * * *", tz=zone)(lambda conn, run: record(run))
    job("quarterly", every="6h", transactional=False)(record)

    start = now = datetime.fromisoformat(first).replace(tzinfo=UTC)
    set_clock(now)
    lease = make_lease("scheduler", database_url)
    while now < start + WEEK:
        if now.hour % 11 == 7:  # replicas come and go
            lease = make_lease("scheduler", database_url)
        with Scheduler(lease, JOBS) as leader:
            while leader.running or not (pause := leader.look()):
                wait(leader.running.values(), timeout=20)
            while leader.running:
                wait(leader.running.values(), timeout=20)
                pause = leader.look()
        now = min(now + timedelta(seconds=pause), start + WEEK)
        set_clock(now)

    days = [(start + timedelta(days=n)).date() for n in range(7)]
    daily = [f"{day} {time}" for day, time in zip(days, [*before, on, *after], strict=True)]
    expected = {
        "daily": [datetime.fromisoformat(time).replace(tzinfo=UTC) for time in daily],
        "hourly": [start + timedelta(minutes=20) + n * HOUR for n in range(7 * 24 if "hourly" in JOBS else 0)],
        "quarterly": [start + n * 6 * HOUR for n in range(1, 29)],
    }
    for name, periods in expected.items():
        seen = [period for job, period, _ in ran if job == name]
        assert [period for period in seen if period < start + WEEK] == [p for p in periods if p < start + WEEK], name
    assert all(begun == period for _, period, begun in ran)  # neither early nor late
    assert {(state, attempt) for _, _, state, attempt in conn.execute(RUNS)} == {("succeeded", 1)}
    assert len(ran) == len(conn.execute(RUNS).fetchall())
