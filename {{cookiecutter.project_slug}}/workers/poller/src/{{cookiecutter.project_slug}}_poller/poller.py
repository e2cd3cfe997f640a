"""Takes due tasks in batches; a handler's effects in the database and the end of its task commit together.

    @handler("send_receipt", max_attempts=5)
    def send_receipt(conn: psycopg.Connection, payload: Payload) -> None: ...

A batch is one fenced transaction and a handler runs inside it, behind a savepoint: what it writes through `conn`
happens exactly once, what it does elsewhere at least once. A handler that raises is undone alone and tried again later,
twice as late each time; after `max_attempts` its task is dead and stays in the table with the error. A task whose kind
nobody has registered is set aside and comes back when a release that knows the kind begins to lead.

Keep handlers short: the server ends a transaction that idles for longer than the lease's ttl, and an `enqueue` with the
key of a task that is running waits for it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import structlog

from {{cookiecutter.project_slug}} import Lease

POLL_SECONDS = 1.0
BATCH = 100
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 3600.0

# Marked as done when taken: if the transaction does not get to its end, neither does this.
TAKE = """
with due as (
    select id from {{cookiecutter.project_slug}}.task
    where state = 'waiting' and run_at <= now()
    order by run_at, id
    limit %(batch)s
    for update skip locked
)
update {{cookiecutter.project_slug}}.task as task set
    state = case when kind = any(%(kinds)s::text[]) then 'done' else 'unhandled' end,
    attempts = attempts + (kind = any(%(kinds)s::text[]))::integer,
    finished_at = case when kind = any(%(kinds)s::text[]) then clock_timestamp() end,
    epoch = %(epoch)s
from due where task.id = due.id
returning task.run_at, task.id, task.kind, task.payload, task.attempts
"""

PUT_BACK = """
update {{cookiecutter.project_slug}}.task set state = 'waiting', attempts = attempts - 1, finished_at = null
where id = any(%(ids)s::bigint[])
"""

RETRY = """
update {{cookiecutter.project_slug}}.task
set state = 'waiting', attempts = %(attempts)s, finished_at = null, error = %(error)s::text,
    run_at = clock_timestamp() + %(delay)s::interval
where id = %(id)s
"""

BURY = """
update {{cookiecutter.project_slug}}.task
set state = 'dead', attempts = %(attempts)s, finished_at = clock_timestamp(), error = %(error)s::text
where id = %(id)s
"""

BRING_BACK = """
update {{cookiecutter.project_slug}}.task set state = 'waiting'
where state = 'unhandled' and kind = any(%(kinds)s::text[])
"""

log = structlog.get_logger(__name__)

Payload = dict[str, Any]
Function = Callable[[psycopg.Connection, Payload], None]


@dataclass(frozen=True)
class Handler:
    function: Function
    max_attempts: int


@dataclass(frozen=True)
class Task:
    id: int
    kind: str
    payload: Payload
    attempts: int


HANDLERS: dict[str, Handler] = {}


def handler(kind: str, *, max_attempts: int = 10) -> Callable[[Function], Function]:
    """Register a function as the handler of all tasks of a kind.

    Raises:
        ValueError: the kind has a handler already, or no attempt is allowed.
    """
    if kind in HANDLERS:
        raise ValueError(f"tasks of kind {kind!r} have two handlers; give one of them another kind")
    if max_attempts < 1:
        raise ValueError(f"the handler of kind {kind!r} needs at least one attempt, not {max_attempts}")

    def register(function: Function) -> Function:
        HANDLERS[kind] = Handler(function, max_attempts)
        return function

    return register


def run(lease: Lease) -> None:
    with lease.transaction() as conn:
        conn.execute(BRING_BACK, {"kinds": list(HANDLERS)})
    while True:
        lease.check()
        if work(lease) < BATCH and not lease.wait(POLL_SECONDS):
            return


def work(lease: Lease) -> int:
    """Take one batch of due tasks, run them, and return how many there were."""
    running: Task | None = None
    try:
        with lease.transaction() as conn:
            rows = conn.execute(TAKE, {"batch": BATCH, "kinds": list(HANDLERS), "epoch": lease.epoch}).fetchall()
            tasks = [Task(*row[1:]) for row in sorted(rows, key=lambda row: row[:2])]
            for position, running in enumerate(tasks):
                if lease.stopping:
                    left = [task.id for task in tasks[position:] if task.kind in HANDLERS]
                    conn.execute(PUT_BACK, {"ids": left})
                    break
                _attempt(conn, running)
            running = None
    except psycopg.Error as error:
        if running is None or running.kind not in HANDLERS or not conn.closed:
            raise
        # The session ended under this task, and with it the batch. If that was its doing, the next batch would end
        # in the same way, and the next; so it counts as an attempt.
        with lease.transaction() as conn:
            _fail(conn, running, error)
    return len(tasks)


def _attempt(conn: psycopg.Connection, task: Task) -> None:
    if task.kind not in HANDLERS:
        log.warning("task.unhandled", id=task.id, kind=task.kind, hint="no handler is registered for this kind")
        return
    try:
        with conn.transaction():
            HANDLERS[task.kind].function(conn, task.payload)
    except Exception as error:
        if conn.closed:
            raise
        _fail(conn, task, error)


def _fail(conn: psycopg.Connection, task: Task, error: Exception) -> None:
    words = f"{type(error).__name__}: {error}"
    if task.attempts >= HANDLERS[task.kind].max_attempts:
        conn.execute(BURY, {"id": task.id, "attempts": task.attempts, "error": words})
        log.error("task.dead", id=task.id, kind=task.kind, attempts=task.attempts, error=words, exc_info=error)
    else:
        delay = _delay(task.attempts)
        conn.execute(RETRY, {"id": task.id, "attempts": task.attempts, "error": words, "delay": delay})
        log.warning("task.failed", id=task.id, kind=task.kind, error=words, retry_seconds=delay.total_seconds())


def _delay(attempts: int) -> timedelta:
    """Twice as long each time, and never the same for two tasks that failed together."""
    seconds = min(FIRST_RETRY_SECONDS * 2 ** (attempts - 1), LONGEST_RETRY_SECONDS)
    return timedelta(seconds=seconds * random.uniform(0.5, 1.5))
