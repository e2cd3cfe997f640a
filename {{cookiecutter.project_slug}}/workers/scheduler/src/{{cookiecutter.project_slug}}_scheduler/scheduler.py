"""Runs each job once per period, in the order of their planned times.

    @job("invoices", cron="0 2 * * *", tz="Europe/Berlin")
    def invoices(conn: psycopg.Connection, run: Run) -> None: ...       # exactly once: its commit commits the claim

    @job("mailing", every="15m", transactional=False)
    def mailing(lease: Lease, run: Run) -> None: ...                    # at least once: effects outside the database

A new job starts from now. After downtime the latest planned time is caught up with, those before it are not. Nothing
runs early: what counts is the database's clock. A job that raises is tried again, later each time; after `attempts` its
run says failed and stays in `job_run` with the error, and the next period runs as planned.

Jobs run one after the other. A transactional one must be short: the server ends a transaction that idles for longer
than the lease's ttl. Another should call `lease.check()` at times, so that it ends when told to; then the next leader
repeats it.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, overload

import psycopg
import structlog

from {{cookiecutter.project_slug}} import Lease, LeaseLost, ledger
from {{cookiecutter.project_slug}}.ledger import Run

from .schedule import Schedule, parse

LONGEST_PAUSE_SECONDS = 10.0  # retries become due in between, and clocks drift
FIRST_RETRY_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 3600.0

log = structlog.get_logger(__name__)

Transactional = Callable[[psycopg.Connection, Run], None]
External = Callable[[Lease, Run], None]


@dataclass(frozen=True)
class Job:
    name: str
    schedule: Schedule
    transactional: bool
    attempts: int
    function: Callable[[Any, Run], None]


JOBS: dict[str, Job] = {}


@overload
def job(
    name: str, *, cron: str | None = None, every: str | None = None, tz: str = "UTC", attempts: int = 3
) -> Callable[[Transactional], Transactional]: ...
@overload
def job(
    name: str,
    *,
    cron: str | None = None,
    every: str | None = None,
    tz: str = "UTC",
    attempts: int = 3,
    transactional: Literal[False],
) -> Callable[[External], External]: ...
def job(
    name: str,
    *,
    cron: str | None = None,
    every: str | None = None,
    tz: str = "UTC",
    attempts: int = 3,
    transactional: bool = True,
) -> Callable[[Any], Any]:
    """Register a function as a job.

    Args:
        name: its name in the ledger; with another name it is a new job.
        cron: five fields, or six with the seconds first; in the time of `tz`.
        every: an interval instead, such as "30s", "15m", "6h", "1d".
        attempts: how often one period is tried.
        transactional: whether it gets the connection whose commit is its success, or the lease.

    Raises:
        ValueError: with the job's name, for whatever is wrong with the rest.
    """
    if name in JOBS:
        raise ValueError(f"job {name!r} is declared twice; the ledger tells jobs apart by name")
    if attempts < 1:
        raise ValueError(f"job {name!r} needs at least one attempt, not {attempts}")
    try:
        schedule = parse(cron=cron, every=every, tz=tz)
    except ValueError as error:
        raise ValueError(f"job {name!r}: {error}") from None

    def register(function: Callable[[Any, Run], None]) -> Callable[[Any, Run], None]:
        JOBS[name] = Job(name, schedule, transactional, attempts, function)
        return function

    return register


def run(lease: Lease) -> None:
    while lease.wait(tick(lease)):
        pass


def tick(lease: Lease) -> float:
    """Run what is due now, and return for how many seconds nothing else is."""
    names = list(JOBS)
    with lease.transaction() as conn:
        now = ledger.now(conn)
        due = ledger.unfinished(conn, names)
        for name, last in ledger.last_periods(conn, names).items():
            latest = JOBS[name].schedule.latest(now)
            if last is None or latest < now - ledger.MEMORY:
                ledger.skip(conn, name, latest)
            elif latest > last:
                due.append((name, latest))
    for name, period in sorted(due, key=lambda item: item[1]):
        lease.check()
        _attempt(lease, JOBS[name], period)
    if due:
        return 0.0
    pauses = [(job.schedule.next(now) - now).total_seconds() for job in JOBS.values()]
    return min([LONGEST_PAUSE_SECONDS, *pauses])


def _attempt(lease: Lease, job: Job, period: datetime) -> None:
    begun = time.monotonic()
    run: Run | None = None
    try:
        with lease.transaction() as conn:
            if job.transactional:
                run = ledger.claim(conn, job.name, period, lease)
                if run is not None:
                    job.function(conn, run)
                    ledger.finish(conn, run)
            else:
                run = ledger.start(conn, job.name, period, lease)
        if run is not None and not job.transactional:
            if run.attempt > job.attempts:
                raise RuntimeError("every attempt ended with its leader")
            job.function(lease, run)
            with lease.transaction() as conn:
                ledger.finish(conn, run)
    except LeaseLost:
        raise
    except Exception as error:
        if run is None:
            raise  # the database's fault, not the job's
        _fail(lease, job, run, error)
        return
    if run is None:
        log.info("job.skipped", job=job.name, period=period.isoformat(), reason="somebody else has run it")
    else:
        seconds = round(time.monotonic() - begun, 3)
        log.info("job.finished", job=job.name, period=period.isoformat(), attempt=run.attempt, seconds=seconds)


def _fail(lease: Lease, job: Job, run: Run, error: Exception) -> None:
    words = f"{type(error).__name__}: {error}"
    retry_in = None
    if run.attempt < job.attempts:
        seconds = min(FIRST_RETRY_SECONDS * 2 ** (run.attempt - 1), LONGEST_RETRY_SECONDS)
        retry_in = timedelta(seconds=seconds * random.uniform(0.5, 1.5))
    with lease.transaction() as conn:
        ledger.fail(conn, run, words, retry_in=retry_in)
    log.error(
        "job.failed",
        job=job.name,
        period=run.period.isoformat(),
        attempt=run.attempt,
        error=words,
        retry_seconds=retry_in and retry_in.total_seconds(),
        exc_info=error,
    )
