"""One statement of the ledger each; the caller has the transaction."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, LiteralString, Protocol

import psycopg
from psycopg.rows import tuple_row

from ..keys import SERVICE
from .statements import ALONE, CLAIM, FAIL, FINISH, LAST_PERIODS, NOW, PLAN, SKIP, UNFINISHED

#: How far back a period can be claimed. Rows must be kept longer than that.
MEMORY = timedelta(days=90)


class Refused(ValueError):
    """The ledger can't do that: the message names the job, the reason and, where there is one, the way out."""


class Holder(Protocol):
    """What the ledger notes of who claims; a lease, or whoever comes from outside one."""

    @property
    def role(self) -> str | None: ...
    @property
    def epoch(self) -> int | None: ...
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


def claim(
    conn: psycopg.Connection[Any], job: str, period: datetime, holder: Holder | None = None, *, force: bool = False
) -> Run | None:
    """Claim a period in the caller's transaction, whose commit is the success of the run.

    Args:
        conn: in the transaction that does the work; if it is rolled back, nobody has run the job.
        period: the planned time, with a time zone.
        holder: the lease of the worker, noted in the row. From cron, on any number of machines, there is none.
        force: run it whatever the ledger says, but for a period still to come.

    Returns:
        The run, or None: somebody else has it, or it has failed for good, or its next attempt is not due yet.

    Raises:
        Refused: the period has no time zone, lies in the future, or is older than MEMORY.
    """
    return _claim(conn, job, period, holder, "succeeded", force)


def start(
    conn: psycopg.Connection[Any], job: str, period: datetime, holder: Holder, *, force: bool = False
) -> Run | None:
    """Claim a period before its work begins; commit, work, and then `finish` or `fail` the run.

    Also takes over a run that nobody works on any more, as the next attempt.
    Arguments, result and errors are those of `claim`.
    """
    return _claim(conn, job, period, holder, "running", force)


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


def skip(conn: psycopg.Connection[Any], job: str, period: datetime) -> bool:
    """Record that a period is not going to run; False if it is on record already.

    For a job never seen before, this is where its history begins.
    """
    with conn.cursor() as cursor:
        return cursor.execute(SKIP, {"job": job, "period": period}).rowcount == 1


def alone(conn: psycopg.Connection[Any], job: str, period: datetime, holder: Holder) -> bool:
    """Whether nobody else is at any period of the job, and will not be until this transaction ends."""
    parameters = {"job": job, "period": period, "outside": holder.epoch is None, "lock": lock_key(job)}
    return bool(_fetch(conn, ALONE, parameters)[0][0])


def lock_key(job: str) -> int:
    """The advisory lock, of 64 bits, that keeps two runs of a job from overlapping."""
    return int.from_bytes(hashlib.sha256(f"{SERVICE}.job.{job}".encode()).digest()[:8], signed=True)


def now(conn: psycopg.Connection[Any]) -> datetime:
    """The database's clock, in UTC."""
    clock: datetime = _fetch(conn, NOW, {})[0][0]
    return clock.astimezone(UTC)


def last_periods(conn: psycopg.Connection[Any], jobs: list[str]) -> dict[str, datetime | None]:
    """The latest period on record of each job, in UTC; None for a job never seen before."""
    return {job: period and period.astimezone(UTC) for job, period in _fetch(conn, LAST_PERIODS, {"jobs": jobs})}


def unfinished(conn: psycopg.Connection[Any], jobs: list[str]) -> list[tuple[str, datetime]]:
    """Job and period of the runs to attempt again now: their retry is due, or nobody works on them any more."""
    rows = _fetch(conn, UNFINISHED, {"jobs": jobs, "memory": MEMORY})
    return [(job, period.astimezone(UTC)) for job, period in rows]


def plan(
    conn: psycopg.Connection[Any], role: str, jobs: Mapping[str, tuple[str, datetime]], *, forget: bool = False
) -> None:
    """Publish the schedule, as text, and the next planned time of jobs that a worker declares.

    Args:
        role: the worker.
        forget: these are all its jobs; those published before are not declared any more.
    """
    schedules, upcoming = [text for text, _ in jobs.values()], [time for _, time in jobs.values()]
    with conn.cursor() as cursor:
        cursor.execute(
            PLAN, {"role": role, "names": [*jobs], "schedules": schedules, "next": upcoming, "forget": forget}
        )


def _claim(
    conn: psycopg.Connection[Any],
    job: str,
    period: datetime,
    holder: Holder | None,
    state: Literal["running", "succeeded"],
    force: bool,
) -> Run | None:
    if period.tzinfo is None:
        raise Refused(f"the period of job {job!r} needs a time zone: {period.isoformat()}")
    period = period.astimezone(UTC)
    if period > (today := now(conn)):
        raise Refused(f"job {job!r} cannot run early: its period {period.isoformat()} is still to come")
    if period < today - MEMORY and not force:
        raise Refused(
            f"the period {period.isoformat()} of job {job!r} is more than {MEMORY.days} days old:"
            " whether it has run is no longer on record"
        )
    who: dict[str, Any] = {
        "role": holder and holder.role,
        "epoch": holder and holder.epoch,
        "instance": holder and holder.instance,
    }
    rows = _fetch(conn, CLAIM, {"job": job, "period": period, "state": state, "force": force, **who})
    if not rows:
        return None
    attempt, started_at = rows[0]
    return Run(job, period, attempt, started_at.astimezone(UTC), **who)


def _fetch(conn: psycopg.Connection[Any], statement: LiteralString, parameters: dict[str, Any]) -> list[Any]:
    # whatever row factory the caller's connection has
    with conn.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()
