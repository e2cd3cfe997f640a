"""Three promises of the lease, tried out on the configured database: one leads, another takes over, no pooler is trusted.

Real replicas of the lease, in threads of this process, compete for a key that no role has. No other row and no other key
is touched.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any, cast

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import namedtuple_row

from .. import schema
from ..config import ConfigError, Settings
from ..keys import DISTRIBUTION, ENV_PREFIX, SERVICE, VERIFY_KEYS, LeaseKey
from ..lease.elector import Elector
from ..lease.identity import new_instance
from ..lease.session import connect
from ..lease.stability import BoundedConnection, Stability, Verdict, classify
from ..lease.term import Term, clock
from .database import database
from .doctor import DIRECT, Check, fail, ok, warn

ROLE = "verify"
REPLICAS = 3
SLACK_SECONDS = 10.0  # for connecting and probing on a slow network

TIMELINE = "select ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint"
# A key that no run uses; of one that was killed, after a while. Released on this timeline, if that can be read, so that
# the first leader has nobody to wait for. The row stays, since a replica's role may not delete rows of this table.
CLAIM = """
insert into {{cookiecutter.project_slug}}.lease as mine (key, role, timeline, acquired_at, released_at)
select key, %(role)s, %(timeline)s::bigint, clock_timestamp(), clock_timestamp()
  from unnest(%(keys)s::bigint[]) as free (key)
 where not exists (select from {{cookiecutter.project_slug}}.lease
                    where lease.key = free.key and acquired_at > clock_timestamp() - interval '10 minutes')
 order by random() limit 1
on conflict (key) do update
   set role = excluded.role, timeline = excluded.timeline,
       acquired_at = excluded.acquired_at, released_at = excluded.released_at
 where mine.acquired_at is null or mine.acquired_at < clock_timestamp() - interval '10 minutes'
returning key
"""
FREE = "update {{cookiecutter.project_slug}}.lease set acquired_at = null where key = %(key)s and role = %(role)s"
LOOK = """
select lease.epoch, lease.holder, lease.pid, array(
           select pid from pg_locks
            where locktype = 'advisory' and granted and classid = 0 and objsubid = 1 and objid::bigint = lease.key
              and database = (select oid from pg_database where datname = current_database())
       ) as holders
  from {{cookiecutter.project_slug}}.lease where key = %(key)s
"""


def verify(settings: Settings) -> Iterator[Check]:
    """Try it out; each check says what was seen.

    Raises:
        ConfigError: not configured or not migrated; or no throwaway key is free.
        Unreachable: no answer.
    """
    with database(settings.lease_url) as conn:
        if schema.version(conn) < schema.LATEST:
            raise ConfigError(f"the schema is older than this release; run: {DISTRIBUTION} migrate")
        verdict = _classify(settings, settings.lease_url)
        if verdict.stability is Stability.MULTIPLEXED:
            yield fail("pooler rejection", f"rejected, as it must be: {verdict.reason}. Nothing can lead here", DIRECT)
            return
        yield _pooler_rejection(settings, verdict)
        with _Trial(settings, conn) as trial:
            leader = trial.leader()
            yield trial.one_leader(leader)
            if leader is not None:
                yield trial.failover(leader)


def _classify(settings: Settings, url: str) -> Verdict:
    def another() -> BoundedConnection:
        return connect(url, f"{SERVICE}.verify", settings.timing, read_write=False)

    with closing(another()) as conn:
        return classify(conn, another)


def _pooler_rejection(settings: Settings, direct: Verdict) -> Check:
    name, lease = "pooler rejection", f"the lease's URL is {direct.stability.value}"
    if settings.work_url != settings.lease_url:
        work = _classify(settings, settings.work_url)
        if work.stability is Stability.MULTIPLEXED:
            return ok(name, f"{lease}; a lease through {ENV_PREFIX}DATABASE_URL would be rejected: {work.reason}")
    with ExitStack() as stack:
        free = [
            stack.enter_context(closing(connect(settings.lease_url, f"{SERVICE}.verify", settings.timing)))
            for _ in range(2)
        ]
        pooled = classify(_PooledClient(free).as_connection(), lambda: _PooledClient(free).as_connection())
    seen = f"{lease}; through a stand-in for a pooler in transaction mode it is {pooled.stability.value}"
    if pooled.stability is not Stability.MULTIPLEXED:
        return fail(name, f"{seen}, and would be trusted", "report this: the probe does not see through such a pooler")
    return ok(name, f"{seen}: {pooled.reason}")


class _PooledClient:
    """What a client sees of a pooler in transaction mode: each transaction on the connection that was last given back."""

    def __init__(self, free: list[BoundedConnection]) -> None:
        self.info = SimpleNamespace(backend_pid=0)
        self._free = free
        self._server: BoundedConnection | None = None

    def as_connection(self) -> BoundedConnection:
        return cast("BoundedConnection", self)

    def execute(self, statement: Any) -> psycopg.Cursor[Any]:
        server = self._server or self._free.pop()
        cursor = server.execute(statement)
        self._server = server if server.info.transaction_status is not TransactionStatus.IDLE else None
        if self._server is None:
            self._free.append(server)
        return cursor

    def close(self) -> None:
        if self._server is not None:
            self._server.rollback()
            self._free.append(self._server)


class _Replica:
    """An elector in a thread, whose worker does nothing but say that it works."""

    def __init__(self, number: int, key: LeaseKey, settings: Settings, trial: "_Trial") -> None:
        self.name = f"replica {number}"
        self.instance = new_instance([])
        self.term: Term | None = None
        self._trial = trial
        self.elector = Elector(
            settings.lease_url, self.instance, settings.timing, {key: False}, self._start, lambda role: None,
            settings.ttl_seconds, schema.LATEST,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.elector.run, name=self.name, daemon=True)
        self.thread.start()

    def _start(self, term: Term) -> None:
        threading.Thread(target=self._work, args=(term,), daemon=True).start()

    def _work(self, term: Term) -> None:
        self._trial.works(self, term)
        while term.wait(3600):
            pass
        self._trial.ends(self)
        term.ended.set()
        self.elector.worker_ended()


class _Trial:
    """A throwaway key and the replicas that compete for it."""

    def __init__(self, settings: Settings, conn: psycopg.Connection[Any]) -> None:
        self._settings = settings
        self._conn = conn
        self._changed = threading.Condition()
        self._working: list[_Replica] = []
        self._most_at_once = 0
        self._began_at = 0.0
        self._seen = ""
        self._replicas: list[_Replica] = []

    def __enter__(self) -> "_Trial":
        keys = {"keys": [key for key in VERIFY_KEYS if key not in set(LeaseKey)]}
        row = self._conn.execute(CLAIM, {**keys, "role": ROLE, "timeline": self._timeline()}).fetchone()
        if row is None:
            raise ConfigError("every throwaway key is in use: is verify running elsewhere? Try again in ten minutes")
        self._key = LeaseKey(row[0])
        self._replicas = [_Replica(number + 1, self._key, self._settings, self) for number in range(REPLICAS)]
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._replicas:
            replica.elector.stop()
        for replica in self._replicas:
            replica.thread.join(2 * self._settings.ttl_seconds)
        self._conn.execute(FREE, {"key": self._key, "role": ROLE})

    def _timeline(self) -> int | None:
        try:
            row = self._conn.execute(TIMELINE).fetchone()
        except errors.InsufficientPrivilege:
            return None
        return None if row is None else int(row[0])

    # -- told by the workers

    def works(self, replica: _Replica, term: Term) -> None:
        with self._changed:
            replica.term = term
            self._working.append(replica)
            self._most_at_once = max(self._most_at_once, len(self._working))
            self._began_at = clock()
            self._changed.notify_all()

    def ends(self, replica: _Replica) -> None:
        with self._changed:
            self._working.remove(replica)
            self._changed.notify_all()

    # -- what is seen

    def leader(self, other_than: _Replica | None = None) -> _Replica | None:
        """Wait for somebody (else) to work."""
        timing = self._settings.timing
        with self._changed:
            self._changed.wait_for(
                lambda: any(replica is not other_than for replica in self._working),
                timing.horizon + 5 * timing.interval + SLACK_SECONDS,
            )
            return next((replica for replica in self._working if replica is not other_than), None)

    def one_leader(self, leader: _Replica | None) -> Check:
        name = "one leader"
        if leader is None:
            states = ", ".join(sorted({replica.elector.journal.connection for replica in self._replicas}))
            return fail(name, f"none of {REPLICAS} replicas led; their sessions: {states}", "ask doctor what is wrong")
        for _ in range(2):  # everybody tries for the lock at least twice
            self._wait_for_heartbeats()
        if (problem := self._disagreement(leader)) is not None:
            return fail(name, problem, "report this, with the version of PostgreSQL and what is in between")
        return ok(name, f"{leader.name} of {REPLICAS} led, alone: {self._seen}")

    def failover(self, leader: _Replica) -> Check:
        name = "clean failover"
        before = self._look().epoch
        asked_at = clock()
        leader.elector.stop()
        successor = self.leader(other_than=leader)
        if successor is None:
            return fail(name, f"{leader.name} stopped, and nobody took over", "ask doctor what is wrong")
        if (problem := self._disagreement(successor)) is not None:
            return fail(name, problem, "report this, with the version of PostgreSQL and what is in between")
        if (epoch := self._look().epoch) <= before:
            return fail(name, f"the epoch went from {before} to {epoch}", "report this: a stale leader could write")
        took = self._began_at - asked_at
        seen = f"{successor.name} led {took:.2f} s after {leader.name} was asked to stop, never both: {self._seen}"
        if took > 2 * self._settings.interval_seconds + 1:
            return warn(name, seen, "a stand-by was not woken and found the free lock by itself: is NOTIFY held up?")
        return ok(name, seen)

    def _look(self) -> Any:
        with self._conn.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(LOOK, {"key": self._key}).fetchone()

    def _disagreement(self, leader: _Replica) -> str | None:
        """What does not fit one leader; None, and `_seen` set, where the database agrees."""
        row = self._look()
        self._seen = f"epoch {row.epoch}, and pg_locks has one holder of key {self._key.value}, pid {row.pid}"
        if self._most_at_once > 1:
            return f"{self._most_at_once} replicas worked at once"
        if row.holders != [row.pid] or row.holder != leader.instance:
            return f"{leader.name} leads, but pg_locks has the holders {row.holders} and the lease row pid {row.pid}"
        return None

    def _wait_for_heartbeats(self) -> None:
        until = clock() + self._settings.ttl_seconds
        counts = {replica: sum(replica.elector.journal.heartbeats) for replica in self._replicas}
        while clock() < until and any(sum(r.elector.journal.heartbeats) <= n for r, n in counts.items()):
            time.sleep(0.02)
