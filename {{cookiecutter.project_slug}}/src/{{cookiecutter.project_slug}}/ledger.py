"""The ledger: each job once per period, however many replicas, restarts and retries there are.

A lock prevents overlap, not repeats. So every run is a row, and its primary key is the job and its period: the planned
time in UTC, floored by the schedule, never "now". There are two ways to use it.

Exactly once, for effects in this database: claim in the transaction that does the work. They commit together or not at
all, and whoever else claims waits for that and then is told no.

    with lease.transaction() as conn:
        if claim(conn, "invoices", period, lease):
            ...

At least once, for effects anywhere: start, work, finish, each in a transaction of its own.

    if run := start(conn, "mailing", period, lease):
        ...                 # run.period is the key by which the other side can tell a repeat
        finish(conn, run)   # or fail(conn, run, str(error), retry_in=timedelta(minutes=1))

If its leader dies in between, the row stays behind as running. The next leader of the role has a higher epoch, and that
alone says that nobody works on it any more: `start` takes it over at once, with no timeout to guess.

All times are the database's. A period in the future is refused, and so is one older than MEMORY: until then the rows
are kept (the retention sweep goes by MEMORY too), so a node that was away for months cannot repeat a period.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, LiteralString, Protocol

import psycopg
from psycopg.rows import tuple_row

State = Literal["running", "succeeded"]

#: How far back a period can be claimed. Rows must be kept longer than that.
MEMORY = timedelta(days=90)

NOW = "select clock_timestamp()"

SKIP = """
insert into {{cookiecutter.project_slug}}.job_run (job, period, state) values (%(job)s, %(period)s, 'skipped')
on conflict do nothing
"""

LAST = """
select job, (select max(period) from {{cookiecutter.project_slug}}.job_run as run where run.job = known.job)
from unnest(%(jobs)s::text[]) as known (job)
"""

UNFINISHED = """
select job, period from {{cookiecutter.project_slug}}.job_run
where state in ('running', 'retry')
    and job = any(%(jobs)s::text[])
    and period >= clock_timestamp() - %(memory)s::interval
    and (
        (state = 'retry' and retry_at <= clock_timestamp())
        or (state = 'running' and role = %(role)s::text and epoch < %(epoch)s::bigint)
    )
order by period, job
"""

# One statement, so that two who claim at once are told apart by the primary key alone. A loser waits until the winner's
# transaction ends, and the loser of a transaction that was rolled back gets the run.
CLAIM = """
insert into {{cookiecutter.project_slug}}.job_run as run
    (job, period, state, attempt, role, epoch, instance, started_at, finished_at)
select
    %(job)s, %(period)s, %(state)s, 1, %(role)s::text, %(epoch)s::bigint, %(instance)s::text, clock_timestamp(),
    case when %(state)s = 'succeeded' then clock_timestamp() end
on conflict (job, period) do update set
    state = excluded.state,
    attempt = run.attempt + 1,
    role = excluded.role,
    epoch = excluded.epoch,
    instance = excluded.instance,
    started_at = excluded.started_at,
    finished_at = excluded.finished_at,
    retry_at = null
where (run.state = 'retry' and run.retry_at <= clock_timestamp())
    or (run.state = 'running' and run.role = excluded.role and run.epoch < excluded.epoch)
returning attempt, started_at
"""

# Only the attempt that we started: after a takeover the row is somebody else's.
FINISH = """
update {{cookiecutter.project_slug}}.job_run
set state = 'succeeded', finished_at = clock_timestamp()
where job = %(job)s and period = %(period)s and attempt = %(attempt)s and epoch is not distinct from %(epoch)s::bigint
    and state in ('running', 'succeeded')
"""

# An insert where the attempt was claimed in the transaction that has just been rolled back.
FAIL = """
insert into {{cookiecutter.project_slug}}.job_run as run
    (job, period, state, attempt, role, epoch, instance, started_at, finished_at, retry_at, error)
select
    %(job)s, %(period)s, case when %(retry)s::interval is null then 'failed' else 'retry' end, %(attempt)s,
    %(role)s::text, %(epoch)s::bigint, %(instance)s::text, %(started_at)s, clock_timestamp(),
    clock_timestamp() + %(retry)s::interval, %(error)s::text
on conflict (job, period) do update set
    state = excluded.state,
    attempt = excluded.attempt,
    role = excluded.role,
    epoch = excluded.epoch,
    instance = excluded.instance,
    started_at = excluded.started_at,
    finished_at = excluded.finished_at,
    retry_at = excluded.retry_at,
    error = excluded.error
where (run.state = 'running' and run.attempt = excluded.attempt and run.epoch = excluded.epoch)
    or (run.state = 'retry' and run.attempt < excluded.attempt)
"""


class Holder(Protocol):
    """What the ledger notes of a lease."""

    @property
    def role(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def instance(self) -> str: ...


@dataclass(frozen=True)
class Run:
    """One attempt at one period of a job; the period is in UTC."""

    job: str
    period: datetime
    attempt: int
    started_at: datetime
    role: str | None
    epoch: int | None
    instance: str | None


def claim(conn: psycopg.Connection[Any], job: str, period: datetime, lease: Holder | None = None) -> Run | None:
    """Claim a period in the caller's transaction, whose commit is the success of the run.

    Args:
        conn: in the transaction that does the work; if it is rolled back, nobody has run the job.
        period: the planned time, with a time zone.
        lease: of the worker, noted in the row. From cron, on any number of machines, there is none.

    Returns:
        The run, or None: somebody else has it, or it has failed for good, or its next attempt is not due yet.

    Raises:
        ValueError: the period has no time zone, lies in the future, or is older than MEMORY.
    """
    return _claim(conn, job, period, lease, "succeeded")


def start(conn: psycopg.Connection[Any], job: str, period: datetime, lease: Holder) -> Run | None:
    """Claim a period before its work begins; commit, work, and then `finish` or `fail` the run.

    Also takes over a run that an earlier leader of the role left behind, as the next attempt.
    Arguments, result and errors are those of `claim`.
    """
    return _claim(conn, job, period, lease, "running")


def finish(conn: psycopg.Connection[Any], run: Run) -> bool:
    """Record success; False if the run has been taken over in the meantime."""
    with conn.cursor() as cursor:
        return cursor.execute(FINISH, asdict(run)).rowcount == 1


def fail(conn: psycopg.Connection[Any], run: Run, error: str, *, retry_in: timedelta | None = None) -> bool:
    """Record a failed attempt; without `retry_in` it was the last one.

    A run from `claim` has been rolled back with its transaction: call this in a new one.
    Returns False if the run has been taken over in the meantime.
    """
    with conn.cursor() as cursor:
        return cursor.execute(FAIL, {**asdict(run), "error": error, "retry": retry_in}).rowcount == 1


def skip(conn: psycopg.Connection[Any], job: str, period: datetime) -> None:
    """Record that a period is not going to run. For a job never seen before, this is where its history begins."""
    with conn.cursor() as cursor:
        cursor.execute(SKIP, {"job": job, "period": period})


def now(conn: psycopg.Connection[Any]) -> datetime:
    """The database's clock, in UTC."""
    clock: datetime = _fetch(conn, NOW, {})[0][0]
    return clock.astimezone(UTC)


def last_periods(conn: psycopg.Connection[Any], jobs: list[str]) -> dict[str, datetime | None]:
    """The latest period on record of each job, in UTC; None for a job never seen before."""
    return {job: period and period.astimezone(UTC) for job, period in _fetch(conn, LAST, {"jobs": jobs})}


def unfinished(conn: psycopg.Connection[Any], jobs: list[str], lease: Holder) -> list[tuple[str, datetime]]:
    """Job and period of the runs to attempt again now: their retry is due, or a dead leader has left them behind."""
    parameters = {"jobs": jobs, "role": lease.role, "epoch": lease.epoch, "memory": MEMORY}
    rows = _fetch(conn, UNFINISHED, parameters)
    return [(job, period.astimezone(UTC)) for job, period in rows]


def _claim(conn: psycopg.Connection[Any], job: str, period: datetime, lease: Holder | None, state: State) -> Run | None:
    if period.tzinfo is None:
        raise ValueError(f"the period of job {job!r} needs a time zone: {period.isoformat()}")
    period = period.astimezone(UTC)
    if period > (today := now(conn)):
        raise ValueError(f"job {job!r} cannot run early: its period {period.isoformat()} is still to come")
    if period < today - MEMORY:
        raise ValueError(
            f"the period {period.isoformat()} of job {job!r} is more than {MEMORY.days} days old:"
            " whether it has run is no longer on record"
        )
    holder: dict[str, Any] = {
        "role": lease and lease.role,
        "epoch": lease and lease.epoch,
        "instance": lease and lease.instance,
    }
    rows = _fetch(conn, CLAIM, {"job": job, "period": period, "state": state, **holder})
    if not rows:
        return None
    attempt, started_at = rows[0]
    return Run(job, period, attempt, started_at.astimezone(UTC), **holder)


def _fetch(conn: psycopg.Connection[Any], statement: LiteralString, parameters: dict[str, Any]) -> list[Any]:
    # whatever row factory the caller's connection has
    with conn.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
