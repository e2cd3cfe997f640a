"""One-shot locks: do something unless somebody else is doing it, without waiting and without a lease.

    with exclusive(conn, REBUILD) as won:                # a session of its own, direct to PostgreSQL
        if won: ...

    with exclusive_transaction(conn, REBUILD) as won:    # any connection, behind any pooler; the block is a transaction
        if won: ...

Neither has a time to live or a fencing epoch: a session lock lasts as long as the server believes in the session, which
is hours where a host has lost power. For work that goes on, or must not be doubled, write a worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
import structlog
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .keys import KEYS, LeaseKey

# A session that has the lock would get it again, and one unlock would then leave it held.
TRY_SESSION = """
select held, case when not held then pg_try_advisory_lock(%(key)s::bigint) end
from (
    select exists (
        select from pg_locks
        where locktype = 'advisory' and pid = pg_backend_pid() and objsubid = 1 and granted
            and database = (select oid from pg_database where datname = current_database())
            and classid::bigint = (%(key)s::bigint >> 32) & 4294967295
            and objid::bigint = %(key)s::bigint & 4294967295
    ) as held
) as ours
"""
BACKEND = "select pg_backend_pid()"
UNLOCK = "select pg_advisory_unlock(%(key)s::bigint)"
TRY_TRANSACTION = "select pg_try_advisory_xact_lock(%(key)s::bigint)"

HOLDER = """
select pid, coalesce(nullif(application_name, ''), usename::text) from pg_locks join pg_stat_activity using (pid)
where locktype = 'advisory' and objsubid = 1 and granted
    and database = (select oid from pg_database where datname = current_database())
    and classid::bigint = (%(key)s::bigint >> 32) & 4294967295
    and objid::bigint = %(key)s::bigint & 4294967295
"""

log = structlog.get_logger(__name__)


class Misuse(ValueError):
    """This connection or key cannot carry the lock; the message says why and what can."""


@contextmanager
def exclusive(conn: psycopg.Connection[Any], key: int) -> Iterator[bool]:
    """Hold a session-level lock for the length of the block, if it is free now.

    Args:
        conn: an autocommit connection opened for this, not from a pool and not through one.
        key: a constant that stands for what is locked; no LeaseKey.

    Yields:
        Whether the lock is ours; who has it instead is logged.

    Raises:
        Misuse: the connection or the key will not do, or the session has this lock already.
        psycopg.OperationalError: the session ended before the block did, and so did the lock.
    """
    _check_key(key)
    _check_session(conn)
    held, won = _fetch(conn, TRY_SESSION, key)
    if held:
        raise Misuse(f"this session has lock {key} already; a second one would outlast its block")
    if not won:
        _log_skip(conn, key)
    try:
        yield won
    finally:
        if won and not conn.closed:
            if conn.info.transaction_status == TransactionStatus.INERROR:  # it would not take the unlock
                conn.rollback()
            if not _fetch(conn, UNLOCK, key)[0]:
                log.error("exclusive.lost", key=key, hint="something on this session has released the lock")


@contextmanager
def exclusive_transaction(conn: psycopg.Connection[Any], key: int) -> Iterator[bool]:
    """Hold a lock for the length of the block, which is one transaction, if it is free now.

    Args:
        conn: any connection in no transaction; a pool or a transaction pooler is fine.
        key: a constant that stands for what is locked; no LeaseKey.

    Yields:
        Whether the lock is ours; who has it instead is logged.

    Raises:
        Misuse: the connection is in a transaction already, or the key is a LeaseKey.
    """
    _check_key(key)
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise Misuse("the connection is in a transaction already, and the lock would last to the end of that one")
    with conn.transaction():
        (won,) = _fetch(conn, TRY_TRANSACTION, key)
        if not won:
            _log_skip(conn, key)
        yield won


def _check_key(key: int) -> None:
    if type(key) not in (int, LeaseKey):
        raise Misuse(f"{key!r} is no key: give a constant integer (not hash(), which differs from process to process)")
    if key in set(LeaseKey):
        raise Misuse(f"{key} is the lease of {LeaseKey(key).role}; choose a number outside KEYS in keys.py")
    if key in KEYS:
        raise Misuse(f"{key} is kept for the lease of a future worker; choose a number outside KEYS in keys.py")
    if not -(2**63) <= key < 2**63:
        raise Misuse(f"{key} is no key: PostgreSQL's have 64 bits")


def _check_session(conn: psycopg.Connection[Any]) -> None:
    own = "open one of your own with psycopg.connect(..., autocommit=True), or use exclusive_transaction()"
    if getattr(conn, "_pool", None) is not None:  # which psycopg sets on the connections of a pool
        raise Misuse(f"a connection from a pool would be given back and take the lock along; {own}")
    if not conn.autocommit or conn.info.transaction_status != TransactionStatus.IDLE:
        raise Misuse(f"a connection in a transaction would hold back VACUUM for as long as the lock is held; {own}")
    if _fetch(conn, BACKEND, 0)[0] != conn.info.backend_pid:
        raise Misuse(
            "a pooler is in between, which may give this session's server process, and the lock with it, to others;"
            " connect to PostgreSQL itself, or use exclusive_transaction()"
        )


def _log_skip(conn: psycopg.Connection[Any], key: int) -> None:
    pid, holder = _fetch(conn, HOLDER, key) or (None, "gone by now")
    log.info("exclusive.skipped", key=key, holder=holder, pid=pid)


def _fetch(conn: psycopg.Connection[Any], statement: LiteralString, key: int) -> tuple[Any, ...]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(statement, {"key": key}, prepare=False).fetchone() or ()
