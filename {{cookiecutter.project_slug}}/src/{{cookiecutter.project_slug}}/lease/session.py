"""The one PostgreSQL session of a replica: every statement on it stands here, and nothing else runs on it.

Any statement may raise `psycopg.Error` or `Doubt`. In both cases nobody knows what the session still holds: the caller
closes it. Closing always releases.
"""

import contextlib
import os
import secrets
import select
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

from ..config import Timing
from ..keys import CHANNEL, SERVICE, LeaseKey
from . import statements
from .decision import Doubt, Holder, Row, Seen
from .identity import application_name
from .stability import BoundedConnection, Stability, Verdict, classify


class SchemaOutdated(Exception):
    """The database has an older schema than this release needs."""


class Refused(Exception):
    """This database, or the way to it, can't carry a lease."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


@dataclass(frozen=True)
class Beat:
    """What one heartbeat found."""

    timeline: int | None
    seen: Mapping[LeaseKey, Seen]


class Wake:
    """Ends another thread's `Session.wait` or `wait`, or one about to begin."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the other side will wake anyway
            os.write(self._writer, b"\0")

    def fileno(self) -> int:
        return self._reader

    def writer_fileno(self) -> int:
        """For `signal.set_wakeup_fd`."""
        return self._writer

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1 << 16)

    def wait(self, timeout: float) -> None:
        """Sleep until `set` is called, at most `timeout` seconds."""
        select.select([self], [], [], max(0.0, timeout))
        self.clear()


def connect(url: str, name: str, timing: Timing, *, read_write: bool = True) -> BoundedConnection:
    """One connection as the lease needs it: autocommit, nothing prepared, given up early by TCP too.

    Raises:
        psycopg.OperationalError: unreachable, or no server of the URL accepts writes.
    """
    return BoundedConnection.connect(
        url,
        autocommit=True,
        prepare_threshold=None,
        application_name=name,
        connect_timeout=3,
        target_session_attrs="read-write" if read_write else "any",
        keepalives=1,
        keepalives_idle=max(1, int(timing.interval)),
        keepalives_interval=max(1, int(timing.interval)),
        keepalives_count=3,
        tcp_user_timeout=int(timing.ttl * 1000),
    )


class Session:
    """A probed and configured session. One thread owns it."""

    def __init__(self, conn: BoundedConnection, verdict: Verdict, instance: str, timing: Timing) -> None:
        self.verdict = verdict
        self._conn = conn
        self._instance = instance
        self._timing = timing
        self._identity = {"pid": self._fetch("select pg_backend_pid()")[0], "canary": secrets.token_hex(16)}
        self._read_timeline = True
        _open_sessions.add(self)

    @classmethod
    def open(cls, url: str, instance: str, timing: Timing, roles: Iterable[LeaseKey], schema_version: int) -> "Session":
        """Connect, probe, configure.

        Raises:
            psycopg.Error: unreachable, or broken on the way.
            Refused: reachable, and unfit for a lease.
            SchemaOutdated: `migrate` has to run first.
        """
        name = application_name(instance)
        conn = connect(url, name, timing)
        try:
            verdict = classify(conn, lambda: connect(url, f"{SERVICE}.probe", timing, read_write=False))
            if verdict.stability is Stability.MULTIPLEXED:
                raise Refused(verdict.stability.value, verdict.reason)
            conn.bound = timing.trust
            session = cls(conn, verdict, instance, timing)
            session._configure(name)
            session._check_schema(schema_version)
            session._prepare(list(roles))
        except BaseException:
            conn.close()
            raise
        return session

    def _configure(self, name: str) -> None:
        trust = str(int(self._timing.trust * 1000))
        ttl = str(int(self._timing.ttl * 1000))
        # set after connecting: poolers refuse startup options or drop them in silence
        settings = {
            "application_name": name,
            "idle_session_timeout": ttl,  # the time to live: it ends a session whose client fell silent
            "idle_in_transaction_session_timeout": ttl,
            "statement_timeout": trust,
            "lock_timeout": trust,
            "synchronous_commit": "on",  # an epoch lost in a crash would be handed out twice
            statements.CANARY: self._identity["canary"],
        }
        self._conn.execute(statements.CONFIGURE, {"names": list(settings), "values": list(settings.values())})
        visible = [name for name in settings if name not in (statements.CANARY, "application_name")]
        kept = dict(self._conn.execute(statements.READ_BACK, {"names": visible}).fetchall())
        for setting in visible:
            if kept.get(setting) != settings[setting]:
                reason = f"SET {setting} = {settings[setting]} reads back as {kept.get(setting)}"
                raise Refused(Stability.MULTIPLEXED.value, reason)

    def _check_schema(self, needed: int) -> None:
        try:
            found = self._fetch(statements.SCHEMA_VERSION)[0] or 0
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            found = 0
        if found < needed:
            raise SchemaOutdated(f"the database schema is at version {found}, this release needs {needed}")

    def _prepare(self, roles: list[LeaseKey]) -> None:
        try:
            self._fetch("select pg_walfile_name(pg_current_wal_lsn())")
        except psycopg.DatabaseError as error:
            if error.sqlstate is None or self._conn.broken:
                raise
            self._read_timeline = False  # some managed services forbid it: each unclean end then costs the wait
        self._conn.execute(sql.SQL("listen {}").format(sql.Identifier(CHANNEL)))
        self._conn.execute(statements.ENROL, {"keys": [int(k) for k in roles], "roles": [k.role for k in roles]})

    def heartbeat(self, keys: Iterable[LeaseKey], tries: Iterable[LeaseKey]) -> Beat:
        """Prove the session, confirm its locks, try for `tries`."""
        rows = self._conn.execute(
            statements.HEARTBEAT,
            {
                **self._identity,
                "keys": [int(key) for key in keys],
                "tries": [int(key) for key in tries],
                "read_timeline": self._read_timeline,
            },
        ).fetchall()
        same, recovering, timeline = rows[0][:3]
        if recovering:
            raise Doubt("the server is in recovery: it is a stand-by now")
        if not same:
            raise Doubt("the server process, or a setting of our session, is no longer the one that we had")
        seen: dict[LeaseKey, Seen] = {}
        for _, _, _, key, pid, won, name, epoch, heard in rows:
            ours = pid == self._identity["pid"]
            holder = None if pid is None or ours else Holder(pid, name, epoch or 0, heard)
            seen[LeaseKey(key)] = Seen(held=ours, won=won, holder=holder)
        return Beat(timeline, seen)

    def read(self, key: LeaseKey) -> Row:
        """The lease row of a lock that we hold."""
        return Row(*self._fetch(statements.READ, {"key": int(key)}))

    def begin(self, key: LeaseKey, timeline: int | None, *, fenced: bool) -> int | None:
        """Commit the next epoch; None if a transaction in flight holds the row."""
        row = self._conn.execute(
            statements.BEGIN,
            {
                **self._identity,
                "key": int(key),
                "role": key.role,
                "holder": self._instance,
                "fenced": fenced,
                "ttl": self._timing.ttl,
                "trust": self._timing.trust,
                "horizon": self._timing.horizon,
                "timeline": timeline,
            },
        ).fetchone()
        return None if row is None else int(row[0])

    def release(self, key: LeaseKey, epoch: int | None) -> None:
        """Give the lock back and wake the stand-bys. `epoch`: the term that ends cleanly, if one had begun.

        The mark is committed before the lock is free, so that the successor sees it.
        """
        if epoch is not None:
            self._conn.execute(statements.MARK_RELEASED, {"key": int(key), "epoch": epoch, "holder": self._instance})
        row = self._fetch(statements.UNLOCK, {"key": int(key), "channel": CHANNEL, "payload": f"released {key.role}"})
        if row[0] is not True:
            raise Doubt(f"the server did not know our lock on {key.role}")

    def told(self) -> list[str]:
        """The payloads of notifications that have come in; those with the answer to a statement, too."""
        return [notify.payload for notify in self._conn.notifies(timeout=0)]

    def wait(self, timeout: float, wake: Wake) -> list[str] | None:
        """Sleep until a notification, `wake`, or `timeout` seconds.

        Returns the payloads. None: the socket has something that is no notification, most likely its end, so the next
        heartbeat is due now.
        """
        if early := self.told():  # the socket shows nothing of those that came with an answer
            return early
        socket_fd = self._conn.pgconn.socket
        ready, _, _ = select.select([socket_fd, wake.fileno()], [], [], max(0.0, timeout))
        wake.clear()
        if socket_fd not in ready:
            return []
        return self.told() or None

    def close(self) -> None:
        """Close the connection: the server releases whatever the session held."""
        _open_sessions.discard(self)
        self._conn.close()

    def _fetch(self, statement: str, parameters: Mapping[str, object] | None = None) -> tuple[Any, ...]:
        row = self._conn.execute(statement, parameters).fetchone()
        if row is None:
            raise Doubt("a statement that always returns a row returned none")
        return tuple(row)

    def _forget_in_child(self) -> None:
        # /dev/null takes the descriptor's place: nothing of ours can end, or keep alive, the parent's session
        with contextlib.suppress(psycopg.Error, OSError):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, self._conn.pgconn.socket)
            os.close(null)


_open_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_open_sessions):
        session._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
