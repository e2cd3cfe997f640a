import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from {{cookiecutter.project_slug}} import schema
from {{cookiecutter.project_slug}}.keys import SERVICE

HALF = "create table {{cookiecutter.project_slug}}.half (id integer); select 1 / 0;"
LATE = "create table {{cookiecutter.project_slug}}.late (id integer);"
TABLES = "select count(*) from pg_tables where schemaname = '{{cookiecutter.project_slug}}'"
NAMES = "select name from {{cookiecutter.project_slug}}.migration order by version"


@pytest.fixture
def add_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """Adds a migration that the next release might bring."""

    def add(number: int, statements: str) -> None:
        file = tmp_path / f"{number:04}_added.sql"
        file.write_text(statements)
        monkeypatch.setattr(schema, "FILES", {**schema.FILES, number: file})

    return add


def connect(url: str) -> psycopg.Connection:
    return psycopg.connect(url, autocommit=True)


def count(conn: psycopg.Connection) -> int:
    row = conn.execute(TABLES).fetchone()
    assert row is not None
    return int(row[0])


def test_no_two_migrations_have_the_same_number() -> None:
    assert len(schema.FILES) == sum(file.suffix == ".sql" for file in Path(schema.__file__).parent.iterdir())


def test_an_empty_database_is_version_0_and_then_the_latest(empty_database_url: str) -> None:
    with connect(empty_database_url) as conn:
        assert schema.version(conn) == 0
        applied = schema.migrate(conn)
        assert len(applied) == len(schema.FILES)
        assert applied[0] == "0001_lease"
        assert schema.version(conn) == schema.LATEST


def test_migrating_again_does_nothing(conn: psycopg.Connection) -> None:
    assert schema.migrate(conn) == []
    assert schema.version(conn) == schema.LATEST


def test_eight_replicas_migrate_an_empty_database_at_once(empty_database_url: str) -> None:
    together = threading.Barrier(8)

    def replica(_: int) -> list[str]:
        with connect(empty_database_url) as conn:
            together.wait()
            return schema.migrate(conn)

    with ThreadPoolExecutor(8) as replicas:
        applied = [name for names in replicas.map(replica, range(8)) for name in names]
    assert len(applied) == len(schema.FILES)
    with connect(empty_database_url) as conn:
        assert [name for (name,) in conn.execute(NAMES)] == sorted(applied)


def test_a_migration_that_fails_leaves_nothing_behind_and_those_before_it_stand(
    conn: psycopg.Connection, add_migration: Callable[[int, str], None]
) -> None:
    before = count(conn)
    add_migration(schema.LATEST + 1, HALF)
    with pytest.raises(psycopg.errors.DivisionByZero):
        schema.migrate(conn)
    assert count(conn) == before
    assert schema.version(conn) == schema.LATEST
    with conn.transaction():
        assert conn.execute("select pg_try_advisory_xact_lock(%s)", [schema.LOCK]).fetchone() == (True,)


def test_a_newer_schema_is_left_as_it_is(conn: psycopg.Connection) -> None:
    conn.execute(schema.RECORD, [schema.LATEST + 5, "from_a_newer_release"])
    assert schema.migrate(conn) == []
    assert schema.version(conn) == schema.LATEST + 5


def test_a_number_that_arrives_late_is_missing_until_it_is_applied(
    conn: psycopg.Connection, add_migration: Callable[[int, str], None]
) -> None:
    conn.execute(schema.RECORD, [schema.LATEST + 2, "merged_first"])
    add_migration(schema.LATEST + 1, LATE)
    assert schema.version(conn) == schema.LATEST
    assert schema.migrate(conn) == [f"{schema.LATEST + 1:04}_added"]
    assert schema.version(conn) == schema.LATEST + 2


def test_it_waits_for_another_replica_but_not_for_ever(database_url: str, conn: psycopg.Connection) -> None:
    with connect(database_url) as other, other.transaction():
        other.execute("select pg_advisory_xact_lock(%s)", [schema.LOCK])
        with pytest.raises(schema.MigrationBusy, match=r"0\.2 s"):
            schema.migrate(conn, patience_seconds=0.2)
    assert schema.migrate(conn) == []


def test_a_connection_in_a_transaction_is_refused(database_url: str) -> None:
    with psycopg.connect(database_url) as conn:
        conn.execute("select 1")
        with pytest.raises(ValueError, match="in no transaction"):
            schema.migrate(conn)


def test_a_role_that_may_not_create_schemas_can_migrate_a_prepared_one(empty_database_url: str) -> None:
    with connect(empty_database_url) as admin:
        role = sql.Identifier(f"narrow_{admin.info.dbname}")
        service = sql.Identifier(SERVICE)
        admin.execute(sql.SQL("create role {}").format(role))
        try:
            admin.execute(sql.SQL("create schema {} authorization {}").format(service, role))
            with connect(empty_database_url) as conn:
                conn.execute(sql.SQL("set role {}").format(role))
                assert schema.migrate(conn)
                assert schema.version(conn) == schema.LATEST
        finally:
            admin.execute(sql.SQL("drop owned by {}").format(role))
            admin.execute(sql.SQL("drop role {}").format(role))
