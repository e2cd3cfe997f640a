"""Migrations: numbered SQL files beside this one, each applied once, in order, each in one transaction.

`<number>_<name>.sql` holds plain statements, every name qualified with the schema; no `begin`, no `commit`. Never edit
a file that has been released: add the next number. The table `migration` says what was applied and when.

Any number of replicas may migrate at once. Each transaction takes an advisory lock that ends with it, so this also
works behind a transaction pooler, and looks under that lock at what is left to do.
"""

import time
from importlib.resources import files
from typing import LiteralString

import psycopg
from psycopg.pq import TransactionStatus

#: Advisory lock of all migrations: "MIGRATE\0" in ASCII, far above 2**32 and so no LeaseKey. Services generated from
#: the same template share it, which only means that they migrate one after the other.
LOCK = 0x4D49475241544500

#: How long to wait for another replica that is migrating.
PATIENCE_SECONDS = 60.0

#: A migration that has to wait for a table makes everyone behind it wait too. A file may `set local` another value.
LOCK_TIMEOUT = "5s"

FILES = {
    int(file.name.partition("_")[0]): file
    for file in sorted(files(__name__).iterdir(), key=lambda file: file.name)
    if file.name.endswith(".sql")
}
LATEST = max(FILES)

TRY_LOCK = "select pg_try_advisory_xact_lock(%s)"
SCHEMA_EXISTS = "select to_regnamespace('{{cookiecutter.project_slug}}') is not null"
TABLE_EXISTS = "select to_regclass('{{cookiecutter.project_slug}}.migration') is not null"
CREATE_SCHEMA = "create schema {{cookiecutter.project_slug}}"
CREATE_TABLE = """
create table {{cookiecutter.project_slug}}.migration (
    version integer primary key check (version > 0),
    name text not null,
    applied_at timestamptz not null default now()
)
"""
APPLIED = "select version from {{cookiecutter.project_slug}}.migration"
RECORD = "insert into {{cookiecutter.project_slug}}.migration (version, name) values (%s, %s)"


class MigrationBusy(Exception):
    """Another session holds the migration lock and did not finish in time."""


def version(conn: psycopg.Connection) -> int:
    """The version up to which nothing is missing: 0 where nothing was applied, above LATEST after a newer release."""
    applied = _applied(conn)
    missing = FILES.keys() - applied
    return min(missing) - 1 if missing else max(applied)


def migrate(conn: psycopg.Connection, *, patience_seconds: float = PATIENCE_SECONDS) -> list[str]:
    """Bring the schema up to LATEST; a newer one is left as it is.

    Args:
        conn: a connection in no transaction. A transaction pooler in between is fine.
        patience_seconds: how long to wait for a replica that is migrating.

    Returns:
        The names of the migrations that this call applied, in order.

    Raises:
        MigrationBusy: another session was migrating all that time.
        psycopg.Error: a migration failed; it left nothing behind, those before it stand.
    """
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise ValueError("migrate() needs a connection in no transaction: each migration is one of its own")
    deadline = time.monotonic() + patience_seconds
    done: list[str] = []
    while True:
        with conn.transaction():
            if _fetch(conn, TRY_LOCK, LOCK):
                if (name := _apply_next(conn)) is None:
                    return done
                done.append(name)
                continue
        if time.monotonic() > deadline:
            raise MigrationBusy(f"another session was migrating for {patience_seconds:g} s; try again when it is done")
        time.sleep(0.1)


def _apply_next(conn: psycopg.Connection) -> str | None:
    """Apply the lowest migration that is missing and return its name; call it under the lock."""
    # Asked first, since `if not exists` wants the privilege to create even where there is nothing to do.
    if not _fetch(conn, SCHEMA_EXISTS):
        conn.execute(CREATE_SCHEMA)
    if not _fetch(conn, TABLE_EXISTS):
        conn.execute(CREATE_TABLE)
    number = min(FILES.keys() - _applied(conn), default=None)
    if number is None:
        return None
    file = FILES[number]
    name = file.name.removesuffix(".sql")
    conn.execute("select set_config('lock_timeout', %s, true)", [LOCK_TIMEOUT], prepare=False)
    conn.execute(file.read_bytes())
    conn.execute(RECORD, [number, name], prepare=False)
    return name


def _applied(conn: psycopg.Connection) -> set[int]:
    if not _fetch(conn, TABLE_EXISTS):
        return set()
    return {number for (number,) in conn.execute(APPLIED, prepare=False)}


def _fetch(conn: psycopg.Connection, statement: LiteralString, *parameters: object) -> bool:
    # never prepared: the next transaction may run on another server connection
    row = conn.execute(statement, parameters, prepare=False).fetchone()
    return row is not None and bool(row[0])
