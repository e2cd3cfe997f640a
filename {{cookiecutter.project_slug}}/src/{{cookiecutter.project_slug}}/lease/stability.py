"""The probe: is this session one server process from the first statement to the last?

A session-level lock means nothing where a pooler gives each transaction another server process. The classic probe
(pid, temporary table, pid) passes there whenever the pool is idle, measured on PgBouncer 1.18: 50 of 50 equal pids.
So it is one of several, and a second connection decides.
"""

import enum
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

PATIENCE = 2.0  # seconds for one statement of the second connection, or of ours while that one is open
ROUNDS = 3  # a busy pool may hand us the same server process twice by chance

BACKEND_PID = "select pg_backend_pid()"


class Hung(psycopg.OperationalError):
    """A statement got no answer in time; what became of it is unknown."""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection on which no statement waits for an answer longer than `bound` seconds.

    TCP does not do it: keepalives never fire while an answer is outstanding, and no TCP option helps against a proxy
    that stays up while the server behind it is gone.
    """

    bound = PATIENCE

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        started = time.monotonic()
        try:
            return super().wait(gen, interval, self.bound if timeout is None else timeout)
        except psycopg.OperationalError as error:
            if timeout is None and time.monotonic() - started >= self.bound:
                raise Hung(f"no answer within {self.bound:g} s") from error
            raise


class Stability(enum.Enum):
    """What stands between us and the server."""

    DIRECT = "direct"
    SESSION_POOLED = "session-pooled"
    MULTIPLEXED = "multiplexed"


@dataclass(frozen=True)
class Verdict:
    """A class of connection and what showed it."""

    stability: Stability
    reason: str
    temp_allowed: bool = True


def classify(conn: BoundedConnection, connect: Callable[[], BoundedConnection]) -> Verdict:
    """Classify a fresh autocommit connection. `connect` opens a second one by the same way.

    Raises:
        psycopg.Error: the server can't be asked; nothing is known about the session.
    """
    pid = _backend_pid(conn)
    if pid == conn.info.backend_pid:
        verdict = Verdict(Stability.DIRECT, "the protocol and the server name the same backend process")
    else:
        verdict = _behind_pooler(conn, connect, pid)
    if verdict.stability is Stability.MULTIPLEXED:
        return verdict
    try:
        kept = _keeps_temporary_table(conn)
    except errors.InsufficientPrivilege:
        return Verdict(verdict.stability, verdict.reason, temp_allowed=False)
    if not kept or _backend_pid(conn) != pid:
        return Verdict(Stability.MULTIPLEXED, "a temporary table, or the backend process, changed between statements")
    return verdict


def _behind_pooler(conn: BoundedConnection, connect: Callable[[], BoundedConnection], pid: int) -> Verdict:
    for _ in range(ROUNDS):
        with closing(connect()) as other:
            theirs: int | None
            try:
                other.execute("begin")
                theirs = _backend_pid(other)
            except Hung:
                # It stands in the pool's queue, and stays there until closed. In a multiplexing pool it is ahead of us.
                theirs = None
            except errors.ProtocolViolation as error:
                return Verdict(Stability.MULTIPLEXED, f"transactions are refused: {str(error).splitlines()[0]}")
            try:
                ours = _backend_pid(conn)
            except Hung:
                return Verdict(Stability.MULTIPLEXED, "while another client is in a transaction we get no answer")
        if theirs == pid:
            return Verdict(Stability.MULTIPLEXED, "another client was given our backend process")
        if ours != pid:
            return Verdict(Stability.MULTIPLEXED, "our backend process changed between two statements")
        if theirs is None:
            break  # we were served past a client that waits: our backend process is kept for us
    return Verdict(Stability.SESSION_POOLED, "a pooler is in between and leaves us our backend process")


def _keeps_temporary_table(conn: BoundedConnection) -> bool:
    name = secrets.token_hex(8)
    table = sql.Identifier("pg_temp", f"probe_{name}")
    try:
        conn.execute(sql.SQL("create temporary table {} as select {} as value").format(table, sql.Literal(name)))
        row = conn.execute(sql.SQL("select value from {}").format(table)).fetchone()
        conn.execute(sql.SQL("drop table {}").format(table))
    except (errors.UndefinedTable, errors.DuplicateTable):
        return False
    return row is not None and row[0] == name


def _backend_pid(conn: BoundedConnection) -> int:
    row = conn.execute(BACKEND_PID).fetchone()
    assert row is not None
    return int(row[0])
