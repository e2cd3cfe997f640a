"""The queue's public side: put a task in, in the transaction that makes it necessary, and see how long the queue is."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import tuple_row

#: Where `enqueue` announces a task that is due at once.
CHANNEL = "{{cookiecutter.project_slug}}.task"

#: `backlog` counts no further: it is asked every few seconds, and must cost the same however long the queue is.
COUNT_LIMIT = 100_000

NUL = re.compile(r"(?<!\\)(\\\\)*\\u0000")  # as JSON says it

# A task with the key that is not taken yet is locked until our transaction ends, and the poller passes by what is
# locked: so whatever our transaction changes, the task's handler sees it. Where it has just been taken, it may have
# looked before our change: then there is a new one.
ENQUEUE = """
with again as (
    select from {{cookiecutter.project_slug}}.task
    where kind = %(kind)s and key = %(key)s::text and state in ('retry', 'abandoned')
    for update
), added as (
    insert into {{cookiecutter.project_slug}}.task (kind, payload, run_at, key)
    select %(kind)s, %(payload)s::jsonb, coalesce(%(run_at)s::timestamptz, now()), %(key)s::text
    where not exists (select from again)
    on conflict (kind, key) where key is not null and state = 'waiting' do update set key = excluded.key where false
    returning id, run_at
)
select id, case when run_at <= now() then pg_notify(%(channel)s, '') end from added
"""

# The lock of a role is seen by its number in pg_locks, as everywhere (see keys.py).
REQUEUE = """
update {{cookiecutter.project_slug}}.task as task
set state = 'abandoned', error = 'its leader ended during the attempt',
    run_at = clock_timestamp() + least(power(2, least(attempts, 20)), 3600) * (0.5 + random()) * interval '1 s'
from {{cookiecutter.project_slug}}.lease
where task.state = 'running' and lease.role = 'poller' and (
    task.epoch < lease.epoch
    or not exists (
        select from pg_locks
        where locktype = 'advisory' and granted and classid = 0 and objid::bigint = lease.key and objsubid = 1
            and database = (select oid from pg_database where datname = current_database())
    )
)
"""

# Each count ends early, and goes by an index.
BACKLOG = """
select
    coalesce(sum(due.number), 0)::bigint,
    (
        select count(*) from (
            select from {{cookiecutter.project_slug}}.task where state in ('running', 'abandoned')
            order by state limit %(limit)s
        ) as begun
    ),
    (
        select count(*) from (
            select from {{cookiecutter.project_slug}}.task where state = 'dead' order by run_at limit %(limit)s
        ) as dead
    ),
    coalesce(greatest(now() - min(head.run_at), interval '0'), interval '0')
from {{cookiecutter.project_slug}}.task_head as head cross join lateral (
    select count(*) as number from (
        select from {{cookiecutter.project_slug}}.task
        where state in ('waiting', 'retry') and kind = head.kind and run_at <= now()
        order by run_at limit %(limit)s
    ) as task
) as due
"""


@dataclass(frozen=True)
class Backlog:
    """How long the queue is; each number counts no further than COUNT_LIMIT, `waiting` no further in each kind."""

    waiting: int  # due, and not taken yet
    running: int  # those that a dead leader left among them
    dead: int
    oldest: timedelta  # for how long the first of those that wait has been due


def enqueue(
    conn: psycopg.Connection[Any],
    kind: str,
    payload: Mapping[str, object],
    run_at: datetime | None = None,
    key: str | None = None,
) -> int | None:
    """Put a task into the queue; it exists if and when the caller's transaction commits.

    Args:
        conn: in the transaction that the task belongs to.
        kind: which handler runs it. It may be one that only the next release knows.
        payload: handed to the handler, through JSON.
        run_at: not before this time, which has a time zone; by default at once.
        key: at most one task of the kind that is still to begin has this key.

    Returns:
        The id of the task, or None: one with this key is still to begin, and will see what this transaction changed.

    Raises:
        ValueError: the kind is empty, `run_at` has no time zone, or the payload holds what JSON or PostgreSQL can't.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(ENQUEUE, _parameters(kind, payload, run_at, key)).fetchone()
    return None if row is None else int(row[0])


async def enqueue_async(
    conn: psycopg.AsyncConnection[Any],
    kind: str,
    payload: Mapping[str, object],
    run_at: datetime | None = None,
    key: str | None = None,
) -> int | None:
    """`enqueue` on an async connection."""
    async with conn.cursor(row_factory=tuple_row) as cursor:
        row = await (await cursor.execute(ENQUEUE, _parameters(kind, payload, run_at, key))).fetchone()
    return None if row is None else int(row[0])


def requeue(conn: psycopg.Connection[Any]) -> int:
    """Put back the tasks that a dead leader left running; returns how many.

    A leader is dead once it has a successor or nobody holds its lock. If it still runs for a moment, it can't finish
    them any more, and a successor begins only when it has certainly stopped.
    """
    with conn.cursor() as cursor:
        return cursor.execute(REQUEUE).rowcount


def backlog(conn: psycopg.Connection[Any]) -> Backlog:
    """How long the queue is, at a cost that doesn't grow with it."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(BACKLOG, {"limit": COUNT_LIMIT}).fetchone()
    assert row is not None
    return Backlog(*row)


def _parameters(kind: str, payload: Mapping[str, object], run_at: datetime | None, key: str | None) -> dict[str, Any]:
    # checked here, since an error from the server would end the caller's transaction
    if not kind:
        raise ValueError("the kind of a task must not be empty")
    if run_at is not None and run_at.tzinfo is None:
        raise ValueError(f"run_at of a task of kind {kind!r} needs a time zone: {run_at.isoformat()}")
    try:
        text = json.dumps(dict(payload), allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the payload of a task of kind {kind!r} is no JSON: {error}") from error
    if NUL.search(text):
        raise ValueError(f"the payload of a task of kind {kind!r} has a NUL, which PostgreSQL does not store")
    return {"kind": kind, "payload": text, "run_at": run_at, "key": key, "channel": CHANNEL}
