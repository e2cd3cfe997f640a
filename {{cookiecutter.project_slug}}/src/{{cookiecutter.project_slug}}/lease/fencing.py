"""The fenced transaction: it commits only while our epoch is the current one.

The lease row is locked `for share` to the end of the transaction. A successor's epoch is committed to that row, so it
waits for transactions in flight, and a transaction that starts later finds another epoch and changes nothing.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from types import TracebackType
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection

from .term import LeaseLost, Term

# A process that stops inside its transaction must not keep its successor out for ever: the server ends the session
# after `idle_ms` without a statement, and notices within `check_ms` that the client of a running one has died.
FENCE = """
with fence as (
    select epoch from {{ cookiecutter.project_slug }}.lease where key = %(key)s and epoch = %(epoch)s for share
)
select set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
       set_config('client_connection_check_interval', %(check_ms)s, true)
  from fence
"""


class FencedTransaction(
    AbstractContextManager[Connection[Any], None], AbstractAsyncContextManager[AsyncConnection[Any], None]
):
    """`with` on a sync connection, `async with` on an async one."""

    def __init__(
        self,
        term: Term,
        connect: Callable[[], AbstractContextManager[Connection[Any]]],
        connect_async: Callable[[], AbstractAsyncContextManager[AsyncConnection[Any]]],
        ttl: float,
    ) -> None:
        self._term = term
        self._connect = connect
        self._connect_async = connect_async
        self._parameters = {
            "key": int(term.key),
            "epoch": term.epoch,
            "idle_ms": str(int(ttl * 1000)),
            "check_ms": "1000",
        }
        self._stack = ExitStack()
        self._async_stack = AsyncExitStack()

    def __enter__(self) -> Connection[Any]:
        with ExitStack() as stack:
            self._check()
            try:
                conn = stack.enter_context(self._connect())
            except psycopg.OperationalError:  # the database is away, and with it most likely the lease
                self._check()
                raise
            stack.enter_context(conn.transaction())
            self._admit(conn.execute(FENCE, self._parameters).fetchone())
            self._stack = stack.pop_all()
        return conn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    async def __aenter__(self) -> AsyncConnection[Any]:
        async with AsyncExitStack() as stack:
            self._check()
            try:
                conn = await stack.enter_async_context(self._connect_async())
            except psycopg.OperationalError:
                self._check()
                raise
            await stack.enter_async_context(conn.transaction())
            self._admit(await (await conn.execute(FENCE, self._parameters)).fetchone())
            self._async_stack = stack.pop_all()
        return conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._async_stack.__aexit__(kind, error, trace)

    def _check(self) -> None:
        if not self._term.held:
            raise LeaseLost(self._term.reason)

    def _admit(self, row: Any) -> None:
        if row is None:
            raise LeaseLost(f"epoch {self._term.epoch} of {self._term.key.role} is over: a successor has begun")
