"""The queue in the hands of a person: what is in it, run that now, forget that."""

from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from ..task import CHANNEL

PORTION = 10_000  # tasks of one transaction, so that no lock is long

LIST = """
select id, kind, state, attempts, run_at, key, error, payload, created_at, finished_at
from {{cookiecutter.project_slug}}.task
where state = {state} and (%(kind)s::text is null or kind = %(kind)s)
order by {order}
limit %(limit)s
"""
# Orders that the indexes of those states have.
ORDERS = {"waiting": "kind, run_at, id", "retry": "kind, run_at, id", "done": "finished_at desc"}

LOCK = """
select id, state from {{cookiecutter.project_slug}}.task where id = any(%(ids)s::bigint[]) order by id for update
"""

# A dead one gets all its attempts again.
RETRY = """
update {{cookiecutter.project_slug}}.task
set state = case state when 'dead' then 'retry' else state end,
    attempts = case state when 'dead' then 0 else attempts end,
    run_at = now(), finished_at = null
where id = any(%(ids)s::bigint[])
"""
DISCARD = "delete from {{cookiecutter.project_slug}}.task where id = any(%(ids)s::bigint[])"
DEAD = """
select id from {{cookiecutter.project_slug}}.task
where state = 'dead' and (%(kind)s::text is null or kind = %(kind)s)
order by run_at, id limit %(limit)s
for update
"""
WAKE = "select pg_notify(%(channel)s, '')"


class NotPossible(Exception):
    """A task is not there, or is past deciding about; says which and why."""


def read_tasks(conn: psycopg.Connection[Any], state: str, kind: str | None, limit: int) -> list[dict[str, Any]]:
    """Tasks in a state, those that were due first at the top; done ones with the latest at the top."""
    statement = sql.SQL(LIST).format(state=sql.Literal(state), order=sql.SQL(ORDERS.get(state, "run_at, id")))
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, {"kind": kind, "limit": limit}).fetchall()


def decide(conn: psycopg.Connection[Any], statement: LiteralString, ids: list[int]) -> int:
    """RETRY or DISCARD tasks, all of them or none; returns how many.

    Raises:
        NotPossible: one does not exist, is running, or is done.
    """
    with conn.transaction():
        _check(conn, ids)
        return _apply(conn, statement, ids)


def decide_dead(conn: psycopg.Connection[Any], statement: LiteralString, kind: str | None) -> int:
    """RETRY or DISCARD all that are dead, of a kind or of all, in portions; returns how many."""
    number = 0
    while True:
        with conn.transaction():
            ids = [row[0] for row in conn.execute(DEAD, {"kind": kind, "limit": PORTION})]
            if not ids:
                return number
            number += _apply(conn, statement, ids)


def _apply(conn: psycopg.Connection[Any], statement: LiteralString, ids: list[int]) -> int:
    changed = conn.execute(statement, {"ids": ids}).rowcount
    conn.execute(WAKE, {"channel": CHANNEL})
    return changed


def _check(conn: psycopg.Connection[Any], ids: list[int]) -> None:
    found = dict(conn.execute(LOCK, {"ids": ids}).fetchall())
    for number in ids:
        if number not in found:
            raise NotPossible(f"there is no task {number}")
        if found[number] == "running":
            raise NotPossible(f"task {number} is running")
        if found[number] == "done":
            raise NotPossible(f"task {number} is done; to do it again, enqueue another")
