"""What a worker author uses: `Worker` declares one, `Lease` is what its code gets, `LeaseLost` tells it to end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import psycopg
import structlog
from psycopg import AsyncConnection, Connection, sql
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from .config import Settings
from .keys import SERVICE
from .lease.fencing import FencedTransaction
from .lease.term import LeaseLost, Term, clock
from .ledger import Outside

log = structlog.get_logger(__name__)

__all__ = ["Lease", "LeaseLost", "WorkPool", "Worker"]

LISTEN_RETRY_SECONDS = 5.0
LISTENING: dict[str, Any] = {
    "autocommit": True,
    "prepare_threshold": None,
    "application_name": f"{SERVICE}.listen",
    "connect_timeout": 5,
    # nothing is ever outstanding here, so keepalives find a dead server
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
POOL_TIMEOUT = 5.0  # seconds to wait for a work connection, at most: the end of the lease ends the wait


class WorkPool:
    """Work connections of one term; none is opened before it is needed."""

    def __init__(self, settings: Settings) -> None:
        self._options: dict[str, Any] = {
            "min_size": 0,
            "max_size": settings.pool_max_size,
            # else an attempt begun while the server was away would be repeated ever more slowly, in everybody's way
            "reconnect_timeout": POOL_TIMEOUT,
            "open": False,
            # what a transaction pooler stands: nothing prepared, nothing set for the session
            "kwargs": {"autocommit": True, "prepare_threshold": None, "application_name": f"{SERVICE}.work"},
        }
        self._url = settings.work_url
        self.lease_url = settings.lease_url
        self._pool: ConnectionPool[Connection[Any]] = ConnectionPool(
            self._url, check=ConnectionPool.check_connection, **self._options
        )

    def connection(self, timeout: float = POOL_TIMEOUT) -> AbstractContextManager[Connection[Any]]:
        """A connection for a sync worker, given back when the context ends; waits up to `timeout` seconds for one."""
        self._pool.open()
        return self._pool.connection(timeout)

    def asynchronous(self) -> AsyncConnectionPool[AsyncConnection[Any]]:
        """A new, closed pool: an async one belongs to the event loop of one term."""
        return AsyncConnectionPool(self._url, check=AsyncConnectionPool.check_connection, **self._options)

    def close(self) -> None:
        self._pool.close()


class Lease:
    """One term of leadership, as its worker sees it."""

    def __init__(self, term: Term, instance: str, pool: WorkPool, ttl: float) -> None:
        self.instance = instance
        self._term = term
        self._pool = pool
        self._ttl = ttl
        self._async_pool: AsyncConnectionPool[AsyncConnection[Any]] | None = None

    @property
    def role(self) -> str:
        return self._term.key.role

    @property
    def epoch(self) -> int:
        """The fencing token: higher in each term. Send it along to systems that can compare it."""
        return self._term.epoch

    @property
    def held(self) -> bool:
        """Whether the lease is ours and trusted at this moment."""
        return self._term.held

    @property
    def stopping(self) -> bool:
        """Whether the worker should end. While `held`, it may finish what it is at."""
        return self._term.reason is not None

    def wait(self, seconds: float) -> bool:
        """Sleep `seconds`; True when they are over, False at once when the worker should end.

        For sync workers; in an async one use `asyncio.sleep`, which is cancelled.
        """
        return self._term.wait(seconds)

    def check(self) -> None:
        """Return while the worker should go on.

        Raises:
            LeaseLost: it should end.
        """
        self._term.check()

    def transaction(self) -> FencedTransaction:
        """A transaction on a work connection that commits only while our epoch is current.

        `with lease.transaction() as conn:` in a sync worker, `async with` in an async one. Any exception rolls back.
        The server ends it when it idles for `ttl`, so no slow calls to elsewhere inside.

        Raises:
            LeaseLost: the lease is not ours any more; nothing was written.
            psycopg.Error: as the database says.
        """
        return FencedTransaction(self._term, self._connection, self._async_connection, self._ttl)

    async def listen(self, channel: str, wake: Callable[[], object]) -> None:
        """Call `wake` at each NOTIFY on a channel, until cancelled; what was missed in between counts as one.

        It has a connection of its own to the lease's database URL, since a transaction pooler forwards none. Where that
        can't be had, nothing comes, and it is tried again: so look by yourself at times.
        """
        told = False
        while True:
            try:
                async with await AsyncConnection.connect(self._pool.lease_url, **LISTENING) as conn:
                    await conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
                    wake()
                    told = False
                    async for _ in conn.notifies():
                        wake()
            except psycopg.Error as error:
                if not told:
                    told = True
                    log.warning("listen.failed", role=self.role, channel=channel, error=" ".join(str(error).split()))
            await asyncio.sleep(LISTEN_RETRY_SECONDS)

    def guard(self, work: Awaitable[None]) -> Awaitable[None]:
        """For an async worker's own tasks: the same work, cancelled before its next step once the lease is lost."""
        return _Guarded(work, self._term)

    def _patience(self) -> float:
        return min(POOL_TIMEOUT, self._term.remaining)

    def _connection(self) -> AbstractContextManager[Connection[Any]]:
        return self._pool.connection(self._patience())

    @asynccontextmanager
    async def _async_connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        if self._async_pool is None:
            self._async_pool = self._pool.asynchronous()
            await self._async_pool.open()
        async with self._async_pool.connection(self._patience()) as conn:
            yield conn

    async def _close(self) -> None:
        if self._async_pool is not None:
            await self._async_pool.close()


@dataclass(frozen=True)
class Worker:
    """A worker: its code, and how far its effects reach.

    Args:
        run: called with the lease each time this replica begins to lead; sync in a thread, async in an event loop of
            its own. It runs until told to end; if it returns or raises before, the lease is given up and competed for
            again after a back-off.
        effects: "fenced" if every write goes through `lease.transaction()`. A successor then need not wait out an
            unclean end. "external" in all other cases.
        run_job: how `job run` runs one of its jobs, for a worker that has jobs: called with who runs it, the job's name,
            the period or None for the latest, and whether to run it whatever the ledger says; returns whether all is
            well, and what happened.
        examine: asked by `doctor`, with a connection; yields what is wrong with the worker's own set-up, and for each
            what to do.
        sweep: how `sweep` applies its rules by hand, for a worker that has rules: called with a connection, whether to
            only tell, and how; returns how many rules the database refuses.
    """

    run: Callable[[Lease], Awaitable[None] | None]
    effects: Literal["external", "fenced"] = "external"
    run_job: Callable[[Outside, str, datetime | None, bool], tuple[bool, str]] | None = None
    examine: Callable[[Connection[Any]], Iterable[tuple[str, str]]] | None = None
    sweep: Callable[[Connection[Any], bool, Callable[[str], object]], int] | None = None


def run_worker(worker: Worker, lease: Lease, term: Term) -> None:
    """Run a worker through one term, in the calling thread.

    Raises:
        LeaseLost: it was told to end, and ended.
        Exception: whatever its code raised.
    """
    lease.check()
    outcome = worker.run(lease)
    if outcome is not None:
        asyncio.run(_drive(outcome, lease, term))
    lease.check()


class _Guarded(Awaitable[None]):
    """Looks at the lease before each step of a coroutine.

    After a pause its timers and its cancellation are due in the same turn of the event loop, and its timers, being
    older, would go first: one stray step of a leader that is none.
    """

    def __init__(self, work: Awaitable[None], term: Term) -> None:
        self._work = work
        self._term = term

    def __await__(self) -> Generator[Any, Any, None]:
        steps: Generator[Any, Any, None] = self._work.__await__()
        thrown: BaseException | None = None
        told = False
        while True:
            try:
                awaited = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration:
                return
            thrown = None
            try:
                yield awaited
            except BaseException as error:
                thrown = error
            self._term.progress_at = clock()
            if not told and not self._term.held:  # once: its clean-up may await
                told = True
                thrown = thrown or asyncio.CancelledError(self._term.reason)


async def _drive(work: Awaitable[None], lease: Lease, term: Term) -> None:
    """Await an async worker, and cancel it when the term ends."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    term.listen(lambda: loop.call_soon_threadsafe(told.set))

    async def guarded() -> None:
        await _Guarded(work, term)

    task = asyncio.create_task(guarded())
    watch = asyncio.create_task(told.wait())
    try:
        while not task.done() and term.reason is None:
            await asyncio.wait({task, watch}, timeout=term.remaining, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            lease.check()
            raise
    finally:
        term.listen(None)
        watch.cancel()
        await lease._close()
