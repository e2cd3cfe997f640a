"""Runs each job once per period, each in a thread, at most JOBS_AT_ONCE at a time.

A new job starts from now. What has passed while nobody led, or while the job itself was still running, is caught up with
as its `catch_up` says, so a job that takes longer than its period neither overlaps itself nor piles up. Nothing runs
early: what counts is the planned time, on the database's clock. A job that raises is tried again, later each time; after
`attempts` its run says failed and stays in `job_run` with the error, and the next period runs as planned.

A transactional job must be short: the server ends a transaction that idles for longer than the lease's ttl. Another
should call `run.check()` at times, so that it ends when told to; then the next leader repeats it.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta

import psycopg
import structlog

from {{cookiecutter.project_slug}} import Lease, LeaseLost, ledger

from .job import JOBS, Job, attempt

JOBS_AT_ONCE = 4  # a transactional one has a work connection meanwhile, of POOL_MAX_SIZE
LONGEST_PAUSE_SECONDS = 10.0  # retries become due in between, and clocks drift
BUSY_PAUSE_SECONDS = 1.0  # a job that has ended may be due again
PUNCTUAL = timedelta(minutes=1)  # what is not later than that has not been missed: a takeover may lie in between

log = structlog.get_logger(__name__)


def run(lease: Lease) -> None:
    with Scheduler(lease, JOBS) as scheduler:
        while lease.wait(scheduler.look()):
            pass


class Scheduler:
    """The jobs of one term. Leaving the `with` block waits for those that still run."""

    def __init__(self, lease: Lease, jobs: Mapping[str, Job]) -> None:
        self.running: dict[str, Future[None]] = {}
        self._lease = lease
        self._jobs = jobs
        self._threads = ThreadPoolExecutor(JOBS_AT_ONCE, thread_name_prefix="job")

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def look(self) -> float:
        """Start what is due, and return for how many seconds nothing else is.

        Raises:
            LeaseLost: the term is over.
        """
        for name in [name for name, run in self.running.items() if run.done()]:
            self.running.pop(name).result()
        try:
            with self._lease.transaction() as conn:
                now = ledger.now(conn)
                due = self._due(conn, now)
        except psycopg.OperationalError as error:  # no connection free, or the database away: the lease will tell
            log.warning("scheduler.delayed", error=str(error), hint="if the database is there, raise POOL_MAX_SIZE")
            return BUSY_PAUSE_SECONDS
        for name, periods in due.items():
            self.running[name] = self._threads.submit(self._follow, self._jobs[name], periods)
        pauses = [(job.schedule.next(now) - now).total_seconds() for job in self._jobs.values()]
        return min([BUSY_PAUSE_SECONDS if self.running else LONGEST_PAUSE_SECONDS, *pauses])

    def _due(self, conn: psycopg.Connection, now: datetime) -> dict[str, list[datetime]]:
        """The periods to run now of each job that is not running, oldest first."""
        last = ledger.last_periods(conn, [*self._jobs])
        idle = [name for name in self._jobs if name not in self.running]
        due: dict[str, list[datetime]] = {}
        for name, period in ledger.unfinished(conn, idle):
            due.setdefault(name, []).append(period)
        for name in idle:
            periods, dropped = missed(self._jobs[name], last[name], now)
            if dropped is not None:
                if ledger.skip(conn, name, dropped) and last[name] is not None:
                    log.info("job.skipped", job=name, since=str(last[name]), until=str(dropped), reason="missed")
                last[name] = max(last[name] or dropped, dropped)
            if periods:
                due[name] = sorted({*due.get(name, []), *periods})
        ledger.plan(conn, self._lease.role, planned(self._jobs, last, now), forget=True)
        return due

    def _follow(self, job: Job, periods: list[datetime]) -> None:
        for period in periods:
            if self._lease.stopping:
                return
            try:
                outcome = attempt(job, self._lease, period)
            except LeaseLost:
                return
            except (psycopg.Error, ledger.Refused) as error:
                log.warning("job.delayed", job=job.name, period=period.isoformat(), error=str(error))
                return
            if outcome is None:  # and those after it wait too
                log.debug("job.skipped", job=job.name, period=period.isoformat(), reason="somebody else is at it")
                return


def missed(job: Job, last: datetime | None, now: datetime) -> tuple[list[datetime], datetime | None]:
    """What has been planned since the last period on record.

    Returns:
        The periods to run, oldest first, and the latest one that is not going to run.
    """
    time = job.schedule.latest(now)
    if last is None or (job.catch_up == "skip" and time > last and now - time > PUNCTUAL):
        return [], time
    periods: list[datetime] = []
    limit = job.catch_up_limit if job.catch_up == "all" else 1
    while time > max(last, now - ledger.MEMORY) and len(periods) < limit:
        periods.insert(0, time)
        time = job.schedule.latest(time - timedelta(microseconds=1))
    return periods, time if time > last else None


def planned(
    jobs: Mapping[str, Job], last: Mapping[str, datetime | None], now: datetime
) -> dict[str, tuple[str, datetime]]:
    """For `ledger.plan`: each job's schedule and its first planned time that has not begun."""
    return {name: (str(job.schedule), job.schedule.next(last[name] or now)) for name, job in jobs.items()}
