"""Tasks whose effects are in this database: many in one transaction, none twice, and no bad one takes others down.

A batch is one fenced transaction without savepoints (more than 64 that write would slow down every other session's
snapshots). When a handler raises, all is undone; the task is recorded as failed, and those before and after it run
again without it. When the session ends under a batch, nobody knows by whose doing: its halves run on their own, down to
a batch of one, which is to blame.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from {{cookiecutter.project_slug}} import Lease, LeaseLost

from . import queue
from .registry import HANDLERS, Task

BATCH = 500


class _Raised(Exception):
    """A handler raised, and its transaction can still be rolled back in order."""

    def __init__(self, position: int) -> None:
        self.position = position


class _Broke(Exception):
    """The transaction ended under its tasks."""


def run_batches(lease: Lease, kinds: list[str]) -> bool:
    """Run one batch of each kind; False if there was nothing to take."""
    found = False
    for kind in kinds:
        if not lease.stopping and (tasks := queue.take(lease, kind, BATCH, charge=False)):
            found = True
            attempt(lease, tasks)
    return found


def attempt(lease: Lease, tasks: list[Task]) -> None:
    """Run tasks of one kind, and record how each one went."""
    todo = [tasks]
    while todo:
        part = todo.pop()
        try:
            _together(lease, part)
        except _Raised as raised:
            before, culprit, after = part[: raised.position], part[raised.position], part[raised.position + 1 :]
            queue.fail(lease, culprit, raised.__cause__)
            todo += [each for each in (after, before) if each]
        except _Broke as broke:
            if len(part) == 1:
                queue.fail(lease, part[0], broke.__cause__)
            else:
                todo += [part[len(part) // 2 :], part[: len(part) // 2]]


def _together(lease: Lease, tasks: list[Task]) -> None:
    function = HANDLERS[tasks[0].kind].function
    begun = False
    try:
        with lease.transaction() as conn, _prepared(conn):
            done = 0
            while done < len(tasks) and not lease.stopping:
                begun = True
                try:
                    function(conn, tasks[done])
                    if conn.info.transaction_status is TransactionStatus.INERROR:
                        raise RuntimeError("the handler went on after an error of the database, which undid its work")
                except Exception as error:
                    if conn.closed:
                        raise
                    raise _Raised(done) from error
                done += 1
            queue.finish(conn, lease, tasks[:done])
            queue.put_back(conn, lease, tasks[done:])
    except (LeaseLost, _Raised):
        raise
    except Exception as error:
        if begun:
            raise _Broke from error
        raise  # no task had a part in it


@contextmanager
def _prepared(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Have the server prepare what handlers execute again and again, unless a pooler is in between.

    It halves the time of a small statement. A pooler tells its clients a process id of its own.
    """
    direct = conn.execute("select pg_backend_pid()").fetchone() == (conn.info.backend_pid,)
    conn.prepare_threshold = 5 if direct else None
    try:
        yield
    finally:
        conn.prepare_threshold = None
