"""Declaring jobs, and one attempt at one of them.

@job("invoices", cron="0 2 * * *", tz="Europe/Berlin")
def invoices(conn: psycopg.Connection, run: Run) -> None: ...       # exactly once: its commit commits the claim

@job("mailing", every="15m", transactional=False)
def mailing(run: Run) -> None: ...                                  # at least once: effects outside the database
"""

import inspect
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args, overload

import psycopg
import structlog

from {{cookiecutter.project_slug}} import ledger

from .schedule import Schedule, parse

CatchUp = Literal["latest", "skip", "all"]
CATCH_UP_LIMIT = 100

BOUND = "select set_config('statement_timeout', %(milliseconds)s, true)"

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Run(ledger.Run):
    """One attempt at one period of a job, as its code sees it; `period`, in UTC, tells a repeat from a new run."""

    _runner: ledger.Runner = field(repr=False)
    _timeout_seconds: float | None = None
    _begun: float = field(default_factory=time.monotonic, repr=False)

    def check(self) -> None:
        """Return while the job should go on; call it between units of work.

        Raises:
            LeaseLost: this replica is to stop, or leads no longer. Let it pass: the run will be repeated.
            TimeoutError: the job has taken longer than its `timeout_seconds`.
        """
        self._runner.check()
        self.check_time()

    def check_time(self) -> None:
        if self._timeout_seconds is not None and time.monotonic() - self._begun > self._timeout_seconds:
            raise TimeoutError(f"took longer than timeout_seconds={self._timeout_seconds:g}")

    def transaction(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A transaction of its own, for a job that is not transactional; commits only while the lease is ours."""
        return self._runner.transaction()


Transactional = Callable[[psycopg.Connection, Run], object]
External = Callable[[Run], object]


@dataclass(frozen=True)
class Job:
    name: str
    schedule: Schedule
    catch_up: CatchUp
    catch_up_limit: int
    timeout_seconds: float | None
    attempts: int
    transactional: bool
    function: Callable[..., object]


JOBS: dict[str, Job] = {}


@overload
def job(
    name: str,
    *,
    cron: str | None = None,
    every: str | None = None,
    tz: str = "UTC",
    catch_up: CatchUp = "latest",
    catch_up_limit: int = CATCH_UP_LIMIT,
    timeout_seconds: float | None = None,
    attempts: int = ledger.ATTEMPTS,
) -> Callable[[Transactional], Transactional]: ...
@overload
def job(
    name: str,
    *,
    cron: str | None = None,
    every: str | None = None,
    tz: str = "UTC",
    catch_up: CatchUp = "latest",
    catch_up_limit: int = CATCH_UP_LIMIT,
    timeout_seconds: float | None = None,
    attempts: int = ledger.ATTEMPTS,
    transactional: Literal[False],
) -> Callable[[External], External]: ...
def job(
    name: str,
    *,
    cron: str | None = None,
    every: str | None = None,
    tz: str = "UTC",
    catch_up: CatchUp = "latest",
    catch_up_limit: int = CATCH_UP_LIMIT,
    timeout_seconds: float | None = None,
    attempts: int = ledger.ATTEMPTS,
    transactional: bool = True,
) -> Callable[[Any], Any]:
    """Register a function as a job.

    Args:
        name: its name in the ledger; with another name it is a new job.
        cron: five fields, or six with the seconds first; in the time of `tz`.
        every: an interval instead, such as "30s", "15m", "6h", "1d".
        catch_up: which of the planned times to run that have passed without it: the "latest", none ("skip"), or "all",
            oldest first.
        catch_up_limit: how many "all" are at most, counted from the latest.
        timeout_seconds: then `run.check()` raises, a statement is cancelled, and a transactional job is rolled back.
        attempts: how often one period is tried.
        transactional: whether it gets the connection whose commit is its success, before the run.

    Raises:
        ValueError: with the job's name, for whatever is wrong with the rest.
    """
    try:
        schedule = parse(cron=cron, every=every, tz=tz)
        if name in JOBS:
            raise ValueError("is declared twice; the ledger tells jobs apart by name")
        if not name.strip():
            raise ValueError("has no name")
        if catch_up not in get_args(CatchUp):
            raise ValueError(f"catch_up={catch_up!r} is none of {', '.join(map(repr, get_args(CatchUp)))}")
        if catch_up_limit < 1:
            raise ValueError(f"catch_up_limit={catch_up_limit} must be at least 1; to run none, catch_up='skip'")
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds={timeout_seconds:g} leaves it no time")
        if attempts < 1:
            raise ValueError(f"attempts={attempts} must be at least 1")
    except ValueError as error:
        raise ValueError(f"job {name!r}: {error}") from None

    def register(function: Callable[..., object]) -> Callable[..., object]:
        wanted = ["conn", "run"] if transactional else ["run"]
        if inspect.iscoroutinefunction(function) or len(inspect.signature(function).parameters) != len(wanted):
            kind = "" if transactional else ", transactional=False"
            raise ValueError(
                f"job {name!r}{kind}: it must be a plain function that takes ({', '.join(wanted)}),"
                f" not {function.__name__}{inspect.signature(function)}"
            )
        JOBS[name] = Job(name, schedule, catch_up, catch_up_limit, timeout_seconds, attempts, transactional, function)
        return function

    return register


def attempt(job: Job, runner: ledger.Runner, period: datetime, *, force: bool = False) -> ledger.Outcome | None:
    """Attempt one period of a job. Result and errors are those of `ledger.run`; what is forced has one attempt."""
    attempts = 0 if force else job.attempts
    begun = time.monotonic()
    if job.transactional:
        outcome = ledger.run_once(
            runner,
            job.name,
            period,
            lambda *given: _in_transaction(job, runner, *given),
            attempts=attempts,
            force=force,
        )
    else:
        outcome = ledger.run(
            runner, job.name, period, lambda run: _external(job, runner, run), attempts=attempts, force=force
        )
    if outcome is not None:
        _log(outcome, time.monotonic() - begun)
    return outcome


def _in_transaction(job: Job, runner: ledger.Runner, conn: psycopg.Connection[Any], claimed: ledger.Run) -> None:
    run = Run(**vars(claimed), _runner=runner, _timeout_seconds=job.timeout_seconds)
    if job.timeout_seconds is not None:
        conn.execute(BOUND, {"milliseconds": str(max(1, round(job.timeout_seconds * 1000)))})
    try:
        job.function(conn, run)
    finally:
        run.check_time()  # also in place of the error of the statement that was cancelled


def _external(job: Job, runner: ledger.Runner, claimed: ledger.Run) -> None:
    run = Run(**vars(claimed), _runner=runner, _timeout_seconds=job.timeout_seconds)
    if job.timeout_seconds is None:
        job.function(run)
        return
    # A thread can't be ended from outside, so a job that does not look at the time is at least heard of.
    hint = "it should call run.check(); until it ends, its next periods wait"
    watch = threading.Timer(
        job.timeout_seconds,
        log.error,
        ["job.overdue"],
        {"job": job.name, "period": run.period.isoformat(), "hint": hint},
    )
    watch.daemon = True
    watch.start()
    try:
        job.function(run)
    finally:
        watch.cancel()


def _log(outcome: ledger.Outcome, seconds: float) -> None:
    facts: dict[str, Any] = {
        "job": outcome.run.job,
        "period": outcome.run.period.isoformat(),
        "attempt": outcome.run.attempt,
        "seconds": round(seconds, 3),
    }
    if outcome.error is None:
        log.info("job.finished", **facts)
    else:
        facts["retry_seconds"] = outcome.retry_in and round(outcome.retry_in.total_seconds(), 1)
        log.error("job.failed", **facts, error=str(outcome.error), exc_info=outcome.error)
