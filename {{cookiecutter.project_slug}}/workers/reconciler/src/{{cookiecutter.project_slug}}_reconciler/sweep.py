"""Applies the retention rules in bounded batches, oldest rows first, each one fenced transaction, with pauses.

Declare your own in a new module of `rules`:

    RULES = [Rule("public.event", "created_at", keep=timedelta(days=30))]

A rule that the database refuses, say because its table is not there, is logged and left; the others go on.
"""

import psycopg
import structlog
from psycopg import sql

from {{cookiecutter.project_slug}} import Lease

from .rules import Rule, declared

SWEEP_EVERY_SECONDS = 600.0
PAUSE_SECONDS = 0.1

# A row that somebody has locked is left for the next sweep. now(), since an index is of no use to clock_timestamp().
DELETE = """
delete from {table} where ctid = any(array(
    select old.ctid from {table} as old
    where old.{column} < now() - %(keep)s::interval and {where}
    order by old.{column}
    limit %(batch)s
    for update skip locked
))
"""

log = structlog.get_logger(__name__)


def run(lease: Lease) -> None:
    rules = declared()
    while True:
        for rule in rules:
            lease.check()
            sweep(lease, rule)
        if not lease.wait(SWEEP_EVERY_SECONDS):
            return


def sweep(lease: Lease, rule: Rule) -> int:
    """Delete what the rule says, batch by batch, and return how many rows that were."""
    deleted = 0
    try:
        while True:
            batch = delete_batch(lease, rule)
            deleted += batch
            if batch < rule.batch or not lease.wait(PAUSE_SECONDS):
                break
    except (psycopg.ProgrammingError, psycopg.DataError) as error:
        log.error("sweep.failed", table=rule.table, column=rule.column, error=str(error))
    if deleted:
        log.info("sweep.finished", table=rule.table, deleted=deleted)
    return deleted


def delete_batch(lease: Lease, rule: Rule) -> int:
    """Delete one batch and return how many rows it had."""
    with lease.transaction() as conn:
        return conn.execute(statement(rule), {"keep": rule.keep, "batch": rule.batch}).rowcount


def statement(rule: Rule) -> sql.Composed:
    """The statement of one batch; names are quoted as names."""
    return sql.SQL(DELETE).format(
        table=sql.Identifier(*rule.table.split(".")), column=sql.Identifier(rule.column), where=sql.SQL(rule.where)
    )
