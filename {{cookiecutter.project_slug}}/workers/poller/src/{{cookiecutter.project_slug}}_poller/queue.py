"""The queue as the leader sees it: every statement on the table, each in a fenced transaction."""

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psycopg
import structlog

from {{cookiecutter.project_slug}} import Lease

from .registry import HANDLERS, Task

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 3600.0

# '' stands for the tasks that a dead leader left.
LOOK = """
select kind, extract(epoch from run_at - now())::double precision from {{cookiecutter.project_slug}}.task_head
union all
select '', extract(epoch from min(run_at) - now())::double precision from {{cookiecutter.project_slug}}.task
where state = 'abandoned'
"""

# An array, since it leaves the planner no choice but the primary key. Locked is what an `enqueue` with its key, or a
# person, has in hand: it is passed by.
TAKE = """
update {{cookiecutter.project_slug}}.task
set state = 'running', attempts = attempts + %(charge)s, epoch = %(epoch)s
where id = any(array(
    select id from {{cookiecutter.project_slug}}.task
    where kind = %(kind)s and state in ('waiting', 'retry') and run_at <= now()
    order by run_at, id
    limit %(limit)s
    for update skip locked
))
returning run_at, id, kind, payload, attempts
"""

TAKE_ABANDONED = """
update {{cookiecutter.project_slug}}.task
set state = 'running', attempts = attempts + 1, epoch = %(epoch)s
where id = any(array(
    select id from {{cookiecutter.project_slug}}.task
    where state = 'abandoned' and run_at <= now() and kind = any(%(kinds)s::text[])
    order by run_at, id
    limit 1
    for update skip locked
))
returning run_at, id, kind, payload, attempts
"""

# Only what is still ours: an attempt that somebody else has taken over does not end here.
FINISH = """
update {{cookiecutter.project_slug}}.task
set state = 'done', attempts = given.attempt, error = null, finished_at = clock_timestamp()
from unnest(%(ids)s::bigint[], %(attempts)s::integer[]) as given (id, attempt)
where task.id = given.id and state = 'running' and epoch = %(epoch)s
"""

PUT_BACK = """
update {{cookiecutter.project_slug}}.task
set state = 'retry', attempts = given.attempt - 1
from unnest(%(ids)s::bigint[], %(attempts)s::integer[]) as given (id, attempt)
where task.id = given.id and state = 'running' and epoch = %(epoch)s
"""

RETRY = """
update {{cookiecutter.project_slug}}.task
set state = 'retry', attempts = %(attempt)s, error = %(error)s, run_at = clock_timestamp() + %(delay)s::interval
where id = %(id)s and state = 'running' and epoch = %(epoch)s
"""

BURY = """
update {{cookiecutter.project_slug}}.task
set state = 'dead', attempts = %(attempt)s, error = %(error)s, finished_at = clock_timestamp()
where id = %(id)s and state = 'running' and epoch = %(epoch)s
"""

LEFT = "its leader ended during the attempt, which was the last one"

log = structlog.get_logger(__name__)


class NotOurs(Exception):
    """A task was taken over, or changed by hand, while it ran; what its handler did is undone."""


def look(lease: Lease) -> dict[str, float]:
    """Seconds until the first task of each kind is due, below zero where it is; '' are those of a dead leader."""
    with lease.transaction() as conn:
        return {kind: seconds for kind, seconds in conn.execute(LOOK) if seconds is not None}


def take(lease: Lease, kind: str, limit: int, *, charge: bool) -> list[Task]:
    """Take due tasks of a kind, the oldest first.

    Args:
        charge: count the attempt now, so that it counts even if it ends this process. Not in a batch, where it would
            count for all: they come back as abandoned, and are tried one by one.
    """
    parameters = {"kind": kind, "limit": limit, "charge": int(charge), "epoch": lease.epoch}
    with lease.transaction() as conn:
        rows = conn.execute(TAKE, parameters).fetchall()
    return [
        Task(number, kind, payload, attempts + (not charge))
        for _, number, kind, payload, attempts in sorted(rows, key=lambda row: row[:2])
    ]


def take_abandoned(lease: Lease) -> Task | None:
    """Take one task that a dead leader left running."""
    with lease.transaction() as conn:
        row = conn.execute(TAKE_ABANDONED, {"kinds": list(HANDLERS), "epoch": lease.epoch}).fetchone()
    return None if row is None else Task(*row[1:])


def finish(conn: psycopg.Connection[Any], lease: Lease, tasks: Sequence[Task]) -> None:
    """Mark tasks as done, in the transaction that holds their effects if there is one.

    Raises:
        NotOurs: one of them is not ours to finish; the transaction must not commit.
    """
    finished = conn.execute(FINISH, settled(lease, tasks), prepare=False).rowcount
    if finished != len(tasks):
        raise NotOurs(f"{len(tasks) - finished} of {len(tasks)} tasks are no longer ours")


async def finish_async(conn: psycopg.AsyncConnection[Any], lease: Lease, task: Task) -> None:
    """`finish` on an async connection."""
    if (await conn.execute(FINISH, settled(lease, [task]))).rowcount != 1:
        raise NotOurs(f"task {task.id} is no longer ours")


def put_back(conn: psycopg.Connection[Any], lease: Lease, tasks: Sequence[Task]) -> None:
    """Give back what was taken and not begun."""
    if tasks:
        conn.execute(PUT_BACK, settled(lease, tasks), prepare=False)


def fail(lease: Lease, task: Task, error: BaseException | None) -> None:
    """Record an attempt that failed: the task is due again later, or dead.

    Args:
        error: None where the attempt ended with its leader, and was the last one.
    """
    words = LEFT if error is None else f"{type(error).__name__}: {error}".replace("\0", "")
    parameters = {"id": task.id, "attempt": task.attempt, "error": words, "epoch": lease.epoch}
    event = {"id": task.id, "kind": task.kind, "attempt": task.attempt, "error": words}
    last = error is None or task.attempt >= HANDLERS[task.kind].max_attempts
    delay = back_off(task.attempt)
    with lease.transaction() as conn:
        ours = conn.execute(BURY if last else RETRY, {**parameters, "delay": delay}).rowcount == 1
    if not ours:
        log.warning("task.taken_over", **event)
    elif last:
        log.error("task.dead", **event, exc_info=error)
    else:
        log.warning("task.failed", **event, retry_seconds=round(delay.total_seconds(), 1))


def back_off(attempts: int) -> timedelta:
    """Twice as long each time, and never the same for two tasks that failed together."""
    seconds = min(FIRST_RETRY_SECONDS * 2 ** (attempts - 1), LONGEST_RETRY_SECONDS)
    return timedelta(seconds=seconds * random.uniform(0.5, 1.5))


def settled(lease: Lease, tasks: Sequence[Task]) -> dict[str, Any]:
    return {"ids": [task.id for task in tasks], "attempts": [task.attempt for task in tasks], "epoch": lease.epoch}
