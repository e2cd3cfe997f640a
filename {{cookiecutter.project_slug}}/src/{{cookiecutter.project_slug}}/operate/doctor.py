"""What is wrong, and what to do about it: one check after the other, each with what was seen and a hint."""

import enum
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import errors

from .. import gates, schema
from ..config import ConfigError, Settings
from ..keys import DISTRIBUTION, ENV_PREFIX, SERVICE
from ..lease.session import connect
from ..lease.stability import BoundedConnection, Stability, classify
from .database import one_line, place
from .status import RoleStatus, State, read_status

OLDEST_SERVER = 140000  # idle_session_timeout, on which the lease's time to live rests, came with PostgreSQL 14

WRITABLE = "select pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean"
SET_TTL = "select set_config('idle_session_timeout', %(milliseconds)s, false)"
READ_TTL = "select setting from pg_settings where name = 'idle_session_timeout'"
MARK = "select pg_try_advisory_xact_lock(%(mark)s), pg_backend_pid()"
SEE_MARK = """
select exists (
    select from pg_locks
     where locktype = 'advisory' and pid = %(pid)s and (classid::bigint << 32) + objid::bigint = %(mark)s
       and database = (select oid from pg_database where datname = current_database())
)
"""

LEASE_URL = f"{ENV_PREFIX}LEASE_DATABASE_URL"
DIRECT = f"set {LEASE_URL} to the server itself, or to a pooler in session mode"


class Result(enum.StrEnum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One thing looked at; its name is that of its section in the run book."""

    name: str
    result: Result
    seen: str
    hint: str = ""  # what to do, where there is something to do

    @property
    def section(self) -> str:
        return f"docs/runbook.md#{self.name.lower().replace(' ', '-')}"


def ok(name: str, seen: str) -> Check:
    return Check(name, Result.OK, seen)


def warn(name: str, seen: str, hint: str) -> Check:
    return Check(name, Result.WARN, seen, hint)


def fail(name: str, seen: str, hint: str) -> Check:
    return Check(name, Result.FAIL, seen, hint)


def examine(settings: Settings) -> Iterator[Check]:
    """Check everything that `run` needs, in the order in which it would stumble over it.

    Raises:
        ConfigError: no database is configured.
    """
    urls = {"work database": settings.work_url, "lease database": settings.lease_url}
    yield from _gates()
    with ExitStack() as stack:
        reached: dict[str, BoundedConnection] = {}
        for name, url in urls.items():
            try:
                reached[name] = stack.enter_context(_connect(url, settings))
            except psycopg.Error as error:
                yield fail(name, one_line(error), f"is {place(url)} right, and does it take connections from here?")
            else:
                yield ok(name, f"{place(url)}, PostgreSQL {reached[name].info.parameter_status('server_version')}")
        if (lease := reached.get("lease database")) is None:
            return
        yield from _guarded("server version", _version, lease)
        yield from _guarded("read-write", _read_write, lease)
        probe = list(_guarded("connection", lambda conn: _probe(conn, settings), lease))
        yield from probe
        lease = stack.enter_context(_connect(settings.lease_url, settings))  # a probe may leave a connection hanging
        if all(check.result is not Result.FAIL for check in probe):  # else the setting would reach other clients
            yield from _guarded("time to live", lambda conn: _ttl(conn, settings), lease)
        yield from _guarded("schema", _schema, lease)
        if (work := reached.get("work database")) is not None:
            yield from _guarded("same database", lambda conn: _same_database(conn, work, settings), lease)
            yield from _guarded("worker set-up", _set_up, work)
        yield from _guarded("lease keys", _roles, lease)


def _guarded(
    name: str, check: Callable[[BoundedConnection], Iterator[Check]], conn: BoundedConnection
) -> Iterator[Check]:
    try:
        yield from check(conn)
    except psycopg.Error as error:
        yield fail(name, f"could not be looked at: {one_line(error)}", "fix what failed above, then ask again")


def _gates() -> Iterator[Check]:
    found = gates.evaluate()
    try:
        opened = gates.open_workers(found)
    except ConfigError as error:
        for problem in str(error).splitlines():
            yield fail("workers", problem, f"see: {DISTRIBUTION} workers")
        return
    if opened:
        yield ok("workers", f"on: {', '.join(sorted(opened))}")
    else:
        yield warn("workers", "none is on: this replica would stay idle", f"see: {DISTRIBUTION} workers")


def _version(conn: BoundedConnection) -> Iterator[Check]:
    seen = str(conn.info.parameter_status("server_version"))
    if conn.info.server_version < OLDEST_SERVER:
        yield fail("server version", seen, "the lease needs PostgreSQL 14 or later")
    else:
        yield ok("server version", seen)


def _read_write(conn: BoundedConnection) -> Iterator[Check]:
    recovering, read_only = _fetch(conn, WRITABLE)
    if recovering:
        yield fail("read-write", "the server is a hot standby", "name the primary in the URL: a standby can't lead")
    elif read_only:
        hint = "ALTER ROLE or ALTER DATABASE ... RESET default_transaction_read_only"
        yield fail("read-write", "default_transaction_read_only is on", hint)
    else:
        yield ok("read-write", "primary, takes writes")


def _probe(conn: BoundedConnection, settings: Settings) -> Iterator[Check]:
    verdict = classify(conn, lambda: _connect(settings.lease_url, settings))
    seen = f"{verdict.stability.value}: {verdict.reason}"
    match verdict.stability:
        case Stability.DIRECT:
            yield ok("connection", seen)
        case Stability.SESSION_POOLED:
            yield warn("connection", seen, f"keep that pooler in session mode, or {DIRECT}")
        case Stability.MULTIPLEXED:
            yield fail("connection", seen, DIRECT)
            return
    if verdict.temp_allowed:
        yield ok("TEMP privilege", "granted")
    else:
        yield warn(
            "TEMP privilege",
            "revoked: the probe does without its temporary table",
            f"GRANT TEMPORARY ON DATABASE {conn.info.dbname} TO {conn.info.user} makes the probe stronger",
        )


def _ttl(conn: BoundedConnection, settings: Settings) -> Iterator[Check]:
    wanted = str(int(settings.ttl_seconds * 1000))
    _fetch(conn, SET_TTL, milliseconds=wanted)
    kept = _fetch(conn, READ_TTL)[0]
    if kept != wanted:
        seen = f"idle_session_timeout was set to {wanted} ms and reads back as {kept} ms"
        yield fail("time to live", seen, f"a pooler drops settings: {DIRECT}")
    else:
        yield ok("time to live", f"the server ends a silent session after {settings.ttl_seconds:g} s")


def _schema(conn: BoundedConnection) -> Iterator[Check]:
    found = schema.version(conn)
    if found < schema.LATEST:
        seen = f"version {found}, this release needs {schema.LATEST}"
        yield fail("schema", seen, f"run: {DISTRIBUTION} migrate")
    elif found > schema.LATEST:
        seen = f"version {found}, of a newer release than this one ({schema.LATEST})"
        yield warn("schema", seen, "fine during a roll-out")
    else:
        yield ok("schema", f"version {found}")


def _set_up(conn: BoundedConnection) -> Iterator[Check]:
    """What the installed workers, on or off, find wrong with what they need."""
    found = [
        fail("worker set-up", f"{role}: {seen}", hint)
        for role, worker in gates.installed_workers(gates.evaluate()).items()
        if worker.examine is not None
        for seen, hint in worker.examine(conn)
    ]
    yield from found or [ok("worker set-up", "no installed worker finds anything wrong")]


def _same_database(lease: BoundedConnection, work: BoundedConnection, settings: Settings) -> Iterator[Check]:
    """A lock taken through one URL is looked for through the other: no standby or clone passes for the same server."""
    if settings.work_url == settings.lease_url:
        yield ok("same database", "one URL for both")
        return
    mark = secrets.randbits(62)
    with lease.transaction():
        _, pid = _fetch(lease, MARK, mark=mark)
        (same,) = _fetch(work, SEE_MARK, mark=mark, pid=pid)
    if same:
        yield ok("same database", "both URLs lead to one database")
    else:
        hint = f"{ENV_PREFIX}DATABASE_URL and {LEASE_URL} must name one database: epochs fence only in their own"
        yield fail("same database", "the two URLs lead to different databases", hint)


def _roles(conn: BoundedConnection) -> Iterator[Check]:
    try:
        roles = read_status(conn)
    except errors.UndefinedTable:
        yield fail("lease keys", "there is no lease table", f"run: {DISTRIBUTION} migrate")
        return
    collisions = [role for role in roles if role.state is State.COLLISION]
    for role in collisions:
        seen = f"the lock of {role.role}, {role.key}, is held by {role.holder} (pid {role.holder_pid})"
        yield fail("lease keys", seen, "give one of the two another lease key base, or a database of its own")
    if not collisions:
        yield ok("lease keys", "no other program uses them")
    for role in roles:
        yield from _leader(role)


def _leader(role: RoleStatus) -> Iterator[Check]:
    name = "leaders"
    match role.state:
        case State.LEADING:
            yield ok(name, f"{role.role}: led by {role.holder} (pid {role.holder_pid}, epoch {role.epoch})")
        case State.WAITING:
            seen = f"{role.role}: {role.holder} (pid {role.holder_pid}) has the lock, and its term has not begun"
            yield warn(name, seen, "it waits until the former leader must have stopped: one ttl at most, so ask again")
        case State.FREE if role.standbys:
            seen = f"{role.role}: nobody leads, {len(role.standbys)} compete"
            yield warn(name, seen, "ask again; if it stays so, their logs say why")
        case State.FREE:
            yield ok(name, f"{role.role}: nobody competes for it")


def _connect(url: str, settings: Settings) -> BoundedConnection:
    return connect(url, f"{SERVICE}.cli", settings.timing, read_write=False)


def _fetch(conn: BoundedConnection, statement: LiteralString, **parameters: object) -> tuple[Any, ...]:
    row = conn.execute(statement, parameters).fetchone()
    assert row is not None
    return tuple(row)
