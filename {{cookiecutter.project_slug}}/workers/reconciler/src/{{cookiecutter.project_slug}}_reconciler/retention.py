"""The rules in the hands of a person: what would go, away with it now, and what is wrong with them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from .rules import Rule, declared
from .sweep import DELETE, statement, sweep

COUNT_LIMIT = 100_000

OLD = """
select count(*), min(happened_at) from (
    select old.{column} as happened_at from {table} as old
    where old.{column} < now() - %(keep)s::interval and {where}
    order by old.{column}
    limit %(limit)s
) as old
"""
# As if the table were large: what remains without an index condition on the column is a scan of all of it.
LARGE = "set local enable_seqscan = off; set local enable_bitmapscan = off; set local enable_sort = off"


def sweep_by_hand(conn: psycopg.Connection[Any], dry_run: bool, say: Callable[[str], object]) -> int:
    """Tell what would go by each rule, or delete it; returns how many rules the database refuses."""
    refused = 0
    for rule in declared():
        about = f"{rule.table}: {rule.column} older than {rule.keep}"
        try:
            number, oldest = _old(conn, rule)
        except psycopg.ProgrammingError as error:
            refused += 1
            say(f"{about}: refused: {' '.join(str(error).split())}")
            continue
        rows = f"{number} {'row' if number == 1 else 'rows'}" if number < COUNT_LIMIT else f"{number} rows or more"
        if dry_run:
            say(f"{about}: {rows} would go" + (f", the oldest of {oldest:%Y-%m-%d %H:%M:%S%z}" if number else ""))
        else:
            say(f"{about}: {sweep(rule, lambda: _transaction(conn), _sleep)} rows deleted")
    return refused


def examine(conn: psycopg.Connection[Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with the rules: what was seen, and what to do, as `doctor` says it."""
    for rule in declared():
        about = f"retention of {rule.table} by {rule.column}"
        try:
            plan = _plan(conn, rule)
        except psycopg.ProgrammingError as error:
            hint = f"correct the rule in the package {__package__}.rules, or add what it names"
            yield f"{about}: {error.diag.message_primary or error}", hint
            continue
        if not _by_index(plan, rule.column):
            schema, _, table = rule.table.partition(".")
            on = sql.SQL("create index concurrently on {} ({})").format(
                sql.Identifier(schema, table), sql.Identifier(rule.column)
            )
            yield f"{about}: no index begins with the column, so each batch would read the whole table", on.as_string()


def _plan(conn: psycopg.Connection[Any], rule: Rule) -> Any:
    parameters = {"keep": rule.keep, "batch": rule.batch, "since": "-infinity"}
    explain = sql.SQL("explain (format json) ") + statement(DELETE, rule)
    with conn.transaction():
        conn.execute(LARGE)
        row = conn.execute(explain, parameters).fetchone()
    assert row is not None
    return row[0]


def _by_index(plan: Any, column: str) -> bool:
    """Whether a node of the plan, or of a plan in it, goes by an index on the column."""
    if isinstance(plan, list):
        return any(_by_index(each, column) for each in plan)
    if not isinstance(plan, dict):
        return False
    condition = str(plan.get("Index Cond", "")).replace('"', "")
    return f"{column} < " in condition or any(_by_index(each, column) for each in plan.values())


def _old(conn: psycopg.Connection[Any], rule: Rule) -> tuple[int, Any]:
    row = conn.execute(statement(OLD, rule), {"keep": rule.keep, "limit": COUNT_LIMIT}).fetchone()
    assert row is not None
    return row[0], row[1]


@contextmanager
def _transaction(conn: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    with conn.transaction():
        yield conn


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True
