"""Runs with attempts: what is claimed here ends as succeeded, as failed with its error, or is tried again later."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

import psycopg

from ..lease.term import LeaseLost
from .claims import Holder, Run, alone, claim, fail, finish, start

ATTEMPTS = 3
FIRST_RETRY_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 3600.0
RECORD_AGAIN_SECONDS = 1.0


class Runner(Holder, Protocol):
    """Who runs jobs: a `Lease`, or `Outside`."""

    def transaction(self) -> AbstractContextManager[psycopg.Connection[Any]]: ...
    def wait(self, seconds: float, /) -> bool: ...
    def check(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    run: Run
    error: Exception | None = None
    retry_in: timedelta | None = None  # after an error; None: it was the last attempt


def run_once(
    runner: Runner,
    job: str,
    period: datetime,
    work: Callable[[psycopg.Connection[Any], Run], object],
    *,
    attempts: int = ATTEMPTS,
    force: bool = False,
) -> Outcome | None:
    """Attempt a run whose effects are in this database: exactly once, since its commit commits the claim too.

    Args:
        runner: the lease.
        period: the planned time, with a time zone.
        work: called with the connection of the transaction; what it raises rolls all back.
        attempts: how often this period is tried, with growing pauses, before it has failed for good.
        force: as in `claim`.

    Returns:
        None if it can't be run now: somebody else has it, another period of the job is still running, it has failed for
        good, or its next attempt is not due yet.

    Raises:
        LeaseLost: the lease ended first; nothing has happened.
        Refused: as in `claim`.
        psycopg.Error: the database's fault, before the work began; nothing has happened.
    """
    claimed: Run | None = None
    try:
        with runner.transaction() as conn:
            if force or alone(conn, job, period, runner):
                claimed = claim(conn, job, period, runner, force=force)
            if claimed is None:
                return None
            work(conn, claimed)
            finish(conn, claimed)
    except LeaseLost:
        raise
    except Exception as error:
        if claimed is None:
            raise
        return _failed(runner, claimed, error, attempts)
    return Outcome(claimed)


def run(
    runner: Runner,
    job: str,
    period: datetime,
    work: Callable[[Run], object],
    *,
    attempts: int = ATTEMPTS,
    force: bool = False,
) -> Outcome | None:
    """Attempt a run whose effects may be anywhere: at least once, so `work` goes by `run.period` to repeat none.

    Takes over what a dead leader left behind, as the next attempt; that too is bounded by `attempts`.
    The rest is as for `run_once`; but when the lease ends first, the next leader repeats the run.
    """
    with runner.transaction() as conn:
        free = force or alone(conn, job, period, runner)
        claimed = start(conn, job, period, runner, force=force) if free else None
    if claimed is None:
        return None
    if claimed.attempt > attempts and not force:
        return _failed(runner, claimed, RuntimeError("whoever ran it died, each time"), attempts)
    try:
        work(claimed)
    except LeaseLost:
        raise
    except Exception as error:
        return _failed(runner, claimed, error, attempts)
    _record(runner, lambda conn: finish(conn, claimed))
    return Outcome(claimed)


def back_off(attempt: int) -> timedelta:
    """The pause after a failed attempt: twice as long each time, and spread, so that failures don't come in step."""
    seconds = min(FIRST_RETRY_SECONDS * 2.0 ** (attempt - 1), LONGEST_RETRY_SECONDS)
    return timedelta(seconds=seconds * random.uniform(0.5, 1.5))


def _failed(runner: Runner, claimed: Run, error: Exception, attempts: int) -> Outcome:
    retry_in = back_off(claimed.attempt) if claimed.attempt < attempts else None
    words = f"{type(error).__name__}: {error}"
    _record(runner, lambda conn: fail(conn, claimed, words, retry_in=retry_in))
    return Outcome(claimed, error, retry_in)


def _record(runner: Runner, record: Callable[[psycopg.Connection[Any]], bool]) -> None:
    """Record an end, however long the database is away: else the run would stay behind as running."""
    while True:
        try:
            with runner.transaction() as conn:
                record(conn)
            return
        except psycopg.OperationalError:
            if not runner.wait(RECORD_AGAIN_SECONDS):
                runner.check()
                raise


# Else the server would go on with the statement of a client that was killed, and believe in a dead host for hours; and
# a role's own time-out would end a session that waits.
SETTINGS = """
select set_config('client_connection_check_interval', '1000', %(local)s),
    set_config('tcp_keepalives_idle', '10', %(local)s), set_config('tcp_keepalives_interval', '5', %(local)s),
    set_config('tcp_keepalives_count', '3', %(local)s), set_config('idle_session_timeout', '0', %(local)s)
"""


class Outside:
    """Runs jobs without a lease, from cron on any number of machines. Its runs are given up when its session has ended.

    Args:
        work: an autocommit connection for work.
        session: a connection straight to the database, whose application_name is SERVICE, a blank and `instance`.
        instance: a name that nobody else has.
    """

    role: str | None = None
    epoch: int | None = None

    def __init__(self, work: psycopg.Connection[Any], session: psycopg.Connection[Any], instance: str) -> None:
        self.instance = instance
        self.work = work
        self.session = session
        session.execute(SETTINGS, {"local": False})

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        with self.work.transaction():
            self.work.execute(SETTINGS, {"local": True})
            yield self.work

    def wait(self, seconds: float) -> bool:
        """Not here: when the connection for work is gone, it stays so."""
        return False

    def check(self) -> None:
        """Return while the session is there.

        Raises:
            LeaseLost: it is gone, and somebody else may have taken the run over.
        """
        try:
            self.session.execute("select")
        except psycopg.OperationalError as error:
            raise LeaseLost(f"the session that holds the job is gone: {error}") from error
