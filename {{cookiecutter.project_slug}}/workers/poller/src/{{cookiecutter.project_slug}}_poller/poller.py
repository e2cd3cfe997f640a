"""The loop: looks which kinds are due, and opens lanes in which their tasks run.

All batches share one lane. A kind that is not batched has as many lanes as its `concurrency`, so that kinds don't wait
for each other. One more lane is for the tasks that a dead leader left, one at a time: if one of them ends this process
again, it is the only one of them that the attempt is counted for, and after `max_attempts` it is dead.

A task put in wakes the loop through LISTEN; where that can't be had, it looks once in POLL_SECONDS.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import structlog

from {{cookiecutter.project_slug}} import Lease
from {{cookiecutter.project_slug}}.task import CHANNEL, requeue

from . import batch, queue
from .registry import HANDLERS, Handler, Task

POLL_SECONDS = 1.0
BATCHES = "batches"
ABANDONED = ""

log = structlog.get_logger(__name__)


async def run(lease: Lease) -> None:
    """Run tasks until told to end; those that have begun go on to their end while the lease is held."""
    lanes = sum(handler.concurrency for handler in HANDLERS.values() if not handler.batched)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(lanes + 3, "poller"))
    await Poller(lease).run()


class Poller:
    """One term of the loop."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._wake = asyncio.Event()
        self._lanes: dict[asyncio.Task[bool], str] = {}
        self._unhandled: set[str] = set()

    async def run(self) -> None:
        await asyncio.to_thread(self._begin)
        listener = asyncio.create_task(self._lease.listen(CHANNEL, self._wake.set))
        try:
            while not self._lease.stopping:
                self._wake.clear()
                pause = self._open_lanes(await asyncio.to_thread(queue.look, self._lease))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
                for lane in [lane for lane in self._lanes if lane.done()]:
                    del self._lanes[lane]
                    lane.result()
        except Exception:
            self._cancel()
            raise
        finally:
            listener.cancel()
            while open_lanes := [lane for lane in self._lanes if not lane.done()]:
                if not self._lease.held:
                    self._cancel()
                with suppress(asyncio.CancelledError):  # we are told to end, which we do
                    await asyncio.wait(open_lanes, timeout=0.1)

    def _begin(self) -> None:
        with self._lease.transaction() as conn:
            if number := requeue(conn):
                log.warning("task.abandoned", tasks=number)

    def _cancel(self) -> None:
        for lane in self._lanes:
            lane.cancel()

    def _open_lanes(self, due_in: dict[str, float]) -> float:
        """Open lanes for what is due; returns the seconds until something else may be."""
        due = {kind for kind, seconds in due_in.items() if seconds <= 0}
        taken = Counter(self._lanes.values())
        if ABANDONED in due and not taken[ABANDONED]:
            self._open(ABANDONED, self._run_abandoned())
        batched = [kind for kind in due if kind in HANDLERS and HANDLERS[kind].batched]
        if batched and not taken[BATCHES]:
            self._open(BATCHES, asyncio.to_thread(batch.run_batches, self._lease, batched))
        for kind in due - {ABANDONED, *batched}:
            if (handler := HANDLERS.get(kind)) is not None:
                for _ in range(handler.concurrency - taken[kind]):
                    self._open(kind, self._run_kind(kind, handler))
            elif kind not in self._unhandled:
                self._unhandled.add(kind)
                log.warning("task.unhandled", kind=kind, hint="kept until a release with a handler for it leads")
        return min([POLL_SECONDS, *(seconds for kind, seconds in due_in.items() if kind not in due)])

    def _open(self, name: str, work: Coroutine[None, None, bool]) -> None:
        lane = asyncio.create_task(work)
        self._lanes[lane] = name
        lane.add_done_callback(self._closed)

    def _closed(self, lane: asyncio.Task[bool]) -> None:
        if lane.cancelled() or lane.exception() is not None or lane.result():
            self._wake.set()

    async def _run_kind(self, kind: str, handler: Handler) -> bool:
        """Run tasks of a kind, one after the other, until none is due."""
        found = False
        while not self._lease.stopping and (tasks := await asyncio.to_thread(self._take_one, kind)):
            found = True
            await self._attempt(tasks[0], handler)
        return found

    def _take_one(self, kind: str) -> list[Task]:
        return queue.take(self._lease, kind, 1, charge=True)

    async def _run_abandoned(self) -> bool:
        """Run one task that a dead leader left."""
        task = await asyncio.to_thread(queue.take_abandoned, self._lease)
        if task is None:
            return False
        handler = HANDLERS[task.kind]
        if task.attempt > handler.max_attempts:
            await asyncio.to_thread(queue.fail, self._lease, replace(task, attempt=task.attempt - 1), None)
        elif handler.batched:
            await asyncio.to_thread(batch.attempt, self._lease, [task])
        else:
            await self._attempt(task, handler)
        return True

    async def _attempt(self, task: Task, handler: Handler) -> None:
        try:
            if handler.transactional:
                async with self._lease.transaction() as conn:
                    await self._lease.guard(handler.function(conn, task))
                    await queue.finish_async(conn, self._lease, task)
                return
            if handler.asynchronous:
                await self._lease.guard(handler.function(self._lease, task))
            else:
                await asyncio.to_thread(handler.function, self._lease, task)
        except (Exception, asyncio.CancelledError) as error:
            current = asyncio.current_task()
            if not self._lease.held or (current is not None and current.cancelling()):
                raise
            await asyncio.to_thread(queue.fail, self._lease, task, error)
        else:
            await asyncio.to_thread(self._finish, task)

    def _finish(self, task: Task) -> None:
        with self._lease.transaction() as conn:
            queue.finish(conn, self._lease, [task])
