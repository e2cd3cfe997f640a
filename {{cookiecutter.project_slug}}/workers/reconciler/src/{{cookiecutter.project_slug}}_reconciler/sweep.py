"""Applies the retention rules in bounded batches, oldest rows first, each one transaction, with pauses.

Declare your own in a new module of `rules`:

    RULES = [Rule("public.event", "created_at", keep=timedelta(days=30))]

A batch that takes longer than BATCH_SECONDS is given up and comes again with half as many rows, so no lock is ever
long. A rule that the database refuses, say because its table is not there, is logged and left; the others go on.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
import structlog
from psycopg import errors, sql

from {{cookiecutter.project_slug}} import Lease

from .rules import Rule, declared, repairs

SWEEP_EVERY_SECONDS = 600.0
REPAIR_EVERY_SECONDS = 10.0
PAUSE_SECONDS = 0.1
BATCH_SECONDS = 2.0

# A row that somebody has locked is left for the next sweep. now(), since an index is of no use to clock_timestamp().
# Each batch begins where the one before ended: what was deleted leaves dead entries in the index, and `where` may keep
# rows. The limit of the time is for this transaction alone.
LIMIT = "select set_config('statement_timeout', %(limit)s, true), set_config('lock_timeout', %(limit)s, true)"
DELETE = """
with gone as (
    delete from {table} where ctid = any(array(
        select old.ctid from {table} as old
        where old.{column} >= %(since)s and old.{column} < now() - %(keep)s::interval and {where}
        order by old.{column}
        limit %(batch)s
        for update skip locked
    ))
    returning {column} as happened_at
)
select count(*), max(happened_at)::text from gone
"""

TOO_SLOW = (errors.QueryCanceled, errors.LockNotAvailable)

log = structlog.get_logger(__name__)

Transaction = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]


@dataclass
class Progress:
    """Of one rule in one sweep."""

    rule: Rule
    batch: int
    since: str = "-infinity"  # how far it has come, in PostgreSQL's words
    deleted: int = 0


def run(lease: Lease) -> None:
    """Sweep and repair until told to end."""
    while True:
        for rule in declared():
            lease.check()
            sweep(rule, lease.transaction, lease.wait)
        for _ in range(round(SWEEP_EVERY_SECONDS / REPAIR_EVERY_SECONDS)):
            repair(lease.transaction)
            if not lease.wait(REPAIR_EVERY_SECONDS):
                return


def sweep(rule: Rule, transaction: Transaction, wait: Callable[[float], bool]) -> int:
    """Delete what the rule says, batch by batch; returns how many rows that were.

    Args:
        transaction: what each batch runs in.
        wait: sleeps for some seconds; False ends the sweep.
    """
    progress = Progress(rule, rule.batch)
    try:
        while delete_batch(progress, transaction) and wait(PAUSE_SECONDS):
            pass
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.IntegrityError, *TOO_SLOW) as error:
        log.error("sweep.failed", table=rule.table, column=rule.column, error=" ".join(str(error).split()))
    if progress.deleted:
        log.info("sweep.finished", table=rule.table, deleted=progress.deleted)
    return progress.deleted


def delete_batch(progress: Progress, transaction: Transaction) -> bool:
    """Delete one batch; False if there is nothing left.

    Raises:
        QueryCanceled, LockNotAvailable: not even a single row goes in time.
    """
    rule = progress.rule
    parameters = {"keep": rule.keep, "batch": progress.batch, "since": progress.since}
    try:
        with transaction() as conn:
            conn.execute(LIMIT, {"limit": str(int(BATCH_SECONDS * 1000))})
            ((deleted, until),) = conn.execute(statement(DELETE, rule), parameters).fetchall()
    except TOO_SLOW as error:
        if progress.batch == 1:
            raise
        progress.batch = max(1, progress.batch // 2)
        log.warning("sweep.slower", table=rule.table, batch=progress.batch, error=" ".join(str(error).split()))
        return True
    progress.deleted += deleted
    progress.since = until or progress.since
    return bool(deleted == progress.batch)


def repair(transaction: Transaction) -> None:
    """Run all repairs."""
    for each in repairs():
        with transaction() as conn:
            number = each(conn)
        if number:
            log.warning("sweep.repaired", repair=each.__name__, rows=number)


def statement(text: LiteralString, rule: Rule) -> sql.Composed:
    """A statement about a rule; names are quoted as names."""
    return sql.SQL(text).format(
        table=sql.Identifier(*rule.table.split(".")), column=sql.Identifier(rule.column), where=sql.SQL(rule.where)
    )
