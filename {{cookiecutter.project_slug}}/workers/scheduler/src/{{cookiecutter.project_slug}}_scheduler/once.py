"""`job run`: one job, once, from cron or a CronJob on any number of machines, without a lease and beside a scheduler.

Whoever comes first holds the job's lock, an advisory one, to the end of its attempts; the others say who that is. The
claim is the same as a leader's.
"""

import time
from datetime import UTC, datetime
from difflib import get_close_matches

from {{cookiecutter.project_slug}} import LeaseLost, ledger
from {{cookiecutter.project_slug}}.exclusive import exclusive

from .job import JOBS, Job, attempt
from .scheduler import planned

ROLE = "scheduler"
AGAIN = "to run it all the same: --force"
EARLY_SECONDS = 5.0  # the machine's clock may be ahead of the database's, and cron is punctual

# By the name of its session, but that a leader's transactional run is known by a work connection only.
WHO = """
select coalesce(
    (
        select instance from {{cookiecutter.project_slug}}.job_run as run
        where job = %(job)s and state = 'running' and not {{cookiecutter.project_slug}}.is_abandoned(run) limit 1
    ), (
        select case
            when starts_with(application_name, '{{cookiecutter.project_slug}} ')
            then substr(application_name, length('{{cookiecutter.project_slug}} ') + 1)
            else coalesce(
                (select holder from {{cookiecutter.project_slug}}.lease where role = %(role)s), application_name
            )
        end
        from pg_locks join pg_stat_activity using (pid)
        where locktype = 'advisory' and objsubid = 1 and granted
            and database = (select oid from pg_database where datname = current_database())
            and classid::bigint = (%(lock)s::bigint >> 32) & 4294967295 and objid::bigint = %(lock)s::bigint & 4294967295
        limit 1
    )
)
"""


def run_job(outside: ledger.Outside, name: str, period: datetime | None, force: bool) -> tuple[bool, str]:
    """Run one period of a job unless somebody else has it, and see its attempts through.

    Args:
        outside: with a session straight to the database.
        period: the planned time; None is the latest one.
        force: one attempt, whatever the ledger says, but never beside another `job run` of it, nor before its time.

    Returns:
        Whether all is well, and what happened, for people.

    Raises:
        ValueError: no such job, no such period, or a session that can't carry the lock; the message says what to do.
    """
    if (job := JOBS.get(name)) is None:
        meant = get_close_matches(name, JOBS, n=1)
        hint = f"did you mean {meant[0]}?" if meant else f"known are {', '.join(sorted(JOBS)) or 'none'}"
        raise ledger.Refused(f"there is no job {name!r}: {hint}")
    period = _latest(outside, job) if period is None else _planned(job, period)
    while True:
        with exclusive(outside.session, ledger.lock_key(name)) as won:
            if won:
                try:
                    said = _see_through(outside, job, period, force)
                except LeaseLost as error:
                    return False, f"{name} for {period.isoformat()} was not finished: {error}"
                last = ledger.last_periods(outside.work, [name])
                ledger.plan(outside.work, ROLE, planned({name: job}, last, ledger.now(outside.work)))
                return said
        ended = None if force else _settled(outside, job, period)
        if (known := ended or _busy(outside, job)) is not None:
            return known


def _see_through(outside: ledger.Outside, job: Job, period: datetime, force: bool) -> tuple[bool, str]:
    what = f"{job.name} for {period.isoformat()}"
    while True:
        outcome = attempt(job, outside, period, force=force)
        if outcome is not None and outcome.error is None:
            return True, f"{what} was run here, by {outside.instance}"
        if outcome is not None and outcome.retry_in is None:
            return False, f"{what} has failed: {outcome.error}; {AGAIN}"
        if (known := _settled(outside, job, period) or _busy(outside, job)) is not None:
            return known
        retry_at = next((past.retry_at for past in ledger.history(outside.work, job.name, period=period)), None)
        wait = (retry_at - ledger.now(outside.work)).total_seconds() if retry_at else 0.0
        time.sleep(max(0.1, wait))
        outside.check()


def _settled(outside: ledger.Outside, job: Job, period: datetime) -> tuple[bool, str] | None:
    """What the ledger says of a period that has ended."""
    what = f"{job.name} for {period.isoformat()}"
    for past in ledger.history(outside.work, job.name, period=period):
        match past.state:
            case "succeeded":
                return True, f"{what} was run by {past.instance}, which finished at {past.finished_at}"
            case "skipped":
                return True, f"{what} was skipped, since it was missed or the job was new; {AGAIN}"
            case "failed":
                attempts = f"failed after {past.attempt} attempts, the last by {past.instance}"
                return False, f"{what} {attempts}: {past.error}; {AGAIN}"
    return None


def _busy(outside: ledger.Outside, job: Job) -> tuple[bool, str] | None:
    """Who is at it, unless nobody is, or we are."""
    row = outside.work.execute(WHO, {"job": job.name, "lock": ledger.lock_key(job.name), "role": ROLE}).fetchone()
    if row is None or row[0] in (None, outside.instance):
        return None
    return True, f"{job.name} is being run by {row[0]}"


def _latest(outside: ledger.Outside, job: Job) -> datetime:
    now = ledger.now(outside.work)
    if (wait := (job.schedule.next(now) - now).total_seconds()) <= EARLY_SECONDS:
        time.sleep(wait)
        now = max(now, ledger.now(outside.work))
    return job.schedule.latest(now)


def _planned(job: Job, period: datetime) -> datetime:
    period = (period if period.tzinfo else period.replace(tzinfo=UTC)).astimezone(UTC)
    if (latest := job.schedule.latest(period)) != period:
        raise ledger.Refused(
            f"{period.isoformat()} is no planned time of job {job.name!r} ({job.schedule}); the one before it is"
            f" {latest.isoformat()}, the one after it {job.schedule.next(period).isoformat()}"
        )
    return period
