"""The queue's way in: put a task where the poller will find it, in the transaction that makes it necessary."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

# The poller marks a task in the transaction that runs it. A second task with its key therefore waits for that to end:
# what it is about was perhaps changed after the first one looked.
ENQUEUE = """
insert into {{cookiecutter.project_slug}}.task (kind, payload, run_at, key)
values (%(kind)s, %(payload)s, coalesce(%(run_at)s::timestamptz, now()), %(key)s::text)
on conflict (kind, key) where key is not null and state in ('waiting', 'running', 'unhandled') do nothing
returning id
"""


def enqueue(
    conn: psycopg.Connection[Any],
    kind: str,
    payload: Mapping[str, object],
    *,
    run_at: datetime | None = None,
    key: str | None = None,
) -> int | None:
    """Put a task into the queue; it exists if and when the caller's transaction commits.

    Args:
        conn: in the transaction that the task belongs to.
        kind: which handler runs it. It may be one that only the next release knows.
        payload: handed to the handler, through JSON.
        run_at: not before this time, which has a time zone; by default at once.
        key: at most one task of the kind that is not finished has this key.

    Returns:
        The id of the task, or None: one with this key is waiting already.

    Raises:
        ValueError: `run_at` has no time zone.
    """
    if run_at is not None and run_at.tzinfo is None:
        raise ValueError(f"run_at of a task needs a time zone: {run_at.isoformat()}")
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(
            ENQUEUE, {"kind": kind, "payload": Jsonb(dict(payload)), "run_at": run_at, "key": key}
        ).fetchone()
    return None if row is None else int(row[0])
