import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import psycopg
import pytest
from psycopg_pool import ConnectionPool
from structlog.testing import capture_logs

from {{cookiecutter.project_slug}}.exclusive import Misuse, exclusive, exclusive_transaction
from {{cookiecutter.project_slug}}.keys import KEYS, SERVICE, LeaseKey

KEY = 0x1234_5678_9ABC
LOCKS = "select count(*) from pg_locks where locktype = 'advisory'"
HOLDER = f"""
import sys, time, psycopg
from {SERVICE} import exclusive
with psycopg.connect(sys.argv[1], autocommit=True) as conn, getattr(exclusive, sys.argv[2])(conn, {KEY}) as won:
    print(won, flush=True)
    time.sleep(600)
"""


Lock = Callable[[psycopg.Connection, int], AbstractContextManager[bool]]


@pytest.fixture
def other(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True, application_name="the other") as connection:
        yield connection


def locks(conn: psycopg.Connection) -> int:
    row = conn.execute(LOCKS).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("lock", [exclusive, exclusive_transaction])
@pytest.mark.parametrize("key", [KEY, 7, -7])
def test_one_wins_and_the_other_is_told_no_and_who_has_it(
    conn: psycopg.Connection, other: psycopg.Connection, lock: Lock, key: int
) -> None:
    with capture_logs() as logs, lock(other, key) as first, lock(conn, key) as second:
        assert (first, second) == (True, False)
    assert logs == [
        {
            "event": "exclusive.skipped",
            "log_level": "info",
            "key": key,
            "holder": "the other",
            "pid": other.info.backend_pid,
        }
    ]
    assert locks(conn) == 0
    with lock(conn, key) as won:
        assert won


def test_a_holder_without_an_application_name_is_told_by_its_role(conn: psycopg.Connection, database_url: str) -> None:
    with (
        psycopg.connect(database_url, autocommit=True, application_name="") as nameless,
        capture_logs() as logs,
        exclusive(nameless, KEY),
        exclusive(conn, KEY),
    ):
        assert logs[0]["holder"] == nameless.info.user


@pytest.mark.parametrize("lock", [exclusive, exclusive_transaction])
def test_a_holder_that_is_killed_holds_it_no_longer(conn: psycopg.Connection, database_url: str, lock: Lock) -> None:
    command = [sys.executable, "-c", HOLDER, database_url, lock.__name__]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        with lock(conn, KEY) as won:
            assert not won
        holder.kill()
    deadline = time.monotonic() + 20
    while not won:
        assert time.monotonic() < deadline
        with lock(conn, KEY) as won:
            pass


@pytest.mark.parametrize("lock", [exclusive, exclusive_transaction])
def test_the_lock_ends_with_its_block_whatever_ends_that(
    conn: psycopg.Connection, other: psycopg.Connection, lock: Lock
) -> None:
    with suppress(ZeroDivisionError), lock(conn, KEY):
        assert locks(other) == 1
        _ = 1 / 0
    assert locks(other) == 0


def test_what_fails_in_the_block_rolls_its_transaction_back(conn: psycopg.Connection) -> None:
    conn.execute("create table effect ()")
    with suppress(ZeroDivisionError), exclusive_transaction(conn, KEY):
        conn.execute("insert into effect default values")
        _ = 1 / 0
    assert conn.execute("select count(*) from effect").fetchone() == (0,)


def test_a_session_that_ends_ends_the_block_with_its_own_error(
    conn: psycopg.Connection, other: psycopg.Connection
) -> None:
    def work() -> None:
        with exclusive(conn, KEY):
            other.execute("select pg_terminate_backend(%s)", [conn.info.backend_pid])
            conn.execute("select 1")

    with pytest.raises(psycopg.OperationalError, match="terminating"):
        work()


def test_a_failed_transaction_left_open_in_the_block_keeps_neither_the_lock_nor_the_error(
    conn: psycopg.Connection, other: psycopg.Connection
) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero), exclusive(conn, KEY):
        conn.execute("begin")
        conn.execute("select 1 / 0")
    assert locks(other) == 0


def test_a_lock_released_behind_our_back_is_reported(conn: psycopg.Connection) -> None:
    with capture_logs() as logs, exclusive(conn, KEY):
        conn.execute("select pg_advisory_unlock_all()")
    assert [entry["event"] for entry in logs] == ["exclusive.lost"]


def test_a_session_lock_is_not_taken_twice(conn: psycopg.Connection) -> None:
    with exclusive(conn, KEY), pytest.raises(Misuse, match="already"), exclusive(conn, KEY):
        pass
    assert locks(conn) == 0


def test_a_connection_that_cannot_carry_a_session_lock_is_refused_with_the_reason(database_url: str) -> None:
    with (
        ConnectionPool(database_url, min_size=0, max_size=1, kwargs={"autocommit": True}) as pool,
        pool.connection() as conn,
        pytest.raises(Misuse, match="from a pool"),
        exclusive(conn, KEY),
    ):
        pass
    with psycopg.connect(database_url) as conn, pytest.raises(Misuse, match="autocommit=True"), exclusive(conn, KEY):
        pass


def test_a_transaction_lock_is_refused_inside_another_transaction(conn: psycopg.Connection) -> None:
    with conn.transaction(), pytest.raises(Misuse, match="already"), exclusive_transaction(conn, KEY):
        pass


@pytest.mark.parametrize("lock", [exclusive, exclusive_transaction])
def test_the_key_of_a_lease_and_a_number_too_large_are_refused(conn: psycopg.Connection, lock: Lock) -> None:
    for role in LeaseKey:
        with pytest.raises(Misuse, match=f"the lease of {role.role}"), lock(conn, int(role)):
            pass
    with pytest.raises(Misuse, match="64 bits"), lock(conn, 2**63):
        pass


@pytest.mark.parametrize("lock", [exclusive, exclusive_transaction])
def test_a_key_that_a_new_worker_may_get_and_what_is_no_number_are_refused(
    conn: psycopg.Connection, lock: Lock
) -> None:
    with pytest.raises(Misuse, match="a future worker"), lock(conn, KEYS[-1]):
        pass
    for nonsense in ("rebuild", True, 7.0, None):
        with pytest.raises(Misuse, match="a constant integer"), lock(conn, nonsense):  # type: ignore[arg-type]
            pass
    assert locks(conn) == 0
