"""Fixtures of all tests, those of the workers too: a real PostgreSQL, and a fresh migrated database for each test."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from {{cookiecutter.project_slug}} import Lease, LeaseLost, Worker
from {{cookiecutter.project_slug}}.config import Settings
from {{cookiecutter.project_slug}}.dev import throwaway_postgres
from {{cookiecutter.project_slug}}.gates import toggle_name
from {{cookiecutter.project_slug}}.keys import ENV_PREFIX, SERVICE, LeaseKey
from {{cookiecutter.project_slug}}.lease.term import Term, clock
from {{cookiecutter.project_slug}}.operate.status import State, read_status
from {{cookiecutter.project_slug}}.schema import migrate
from {{cookiecutter.project_slug}}.worker import WorkPool, run_worker

# A shell starts what it runs in the background with Ctrl-C ignored, and everything that we start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Out of the environment, where the service would refuse it as a setting that it does not know.
GIVEN_SERVER = os.environ.pop(f"{ENV_PREFIX}TEST_DATABASE_URL", None)

NEXT_EPOCH = """
insert into {{cookiecutter.project_slug}}.lease as lease (key, role, epoch) values (%(key)s, %(role)s, 1)
on conflict (key) do update set epoch = lease.epoch + 1
returning epoch
"""


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A server on which databases can be created: the one given by the environment, else our own for this session."""
    if GIVEN_SERVER:
        yield GIVEN_SERVER
    else:
        with throwaway_postgres() as url:
            yield url


@pytest.fixture(scope="session")
def _new_database(postgres_url: str) -> Callable[[str], AbstractContextManager[str]]:
    """`with _new_database(template) as url:` is a database as a copy of another, dropped in the end."""

    @contextmanager
    def context(template: str) -> Iterator[str]:
        name = f"test_{uuid.uuid4().hex}"
        names = {"name": sql.Identifier(name), "template": sql.Identifier(template)}
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute(sql.SQL("create database {name} template {template}").format(**names))
            try:
                yield make_conninfo(postgres_url, dbname=name)
            finally:
                admin.execute(sql.SQL("drop database if exists {name} with (force)").format(**names))

    return context


@pytest.fixture(scope="session")
def _migrated(_new_database: Callable[[str], AbstractContextManager[str]]) -> Iterator[str]:
    """Name of a migrated database that the tests' own are copied from."""
    with _new_database("template0") as url:
        with psycopg.connect(url, autocommit=True) as conn:
            migrate(conn)
            name = conn.info.dbname
        yield name


@pytest.fixture
def empty_database_url(_new_database: Callable[[str], AbstractContextManager[str]]) -> Iterator[str]:
    """Conninfo of a fresh database in which nothing was migrated."""
    with _new_database("template0") as url:
        yield url


@pytest.fixture
def database_url(_new_database: Callable[[str], AbstractContextManager[str]], _migrated: str) -> Iterator[str]:
    """Conninfo of a fresh, migrated database of this test's own."""
    with _new_database(_migrated) as url:
        yield url


@pytest.fixture
def conn(database_url: str) -> Iterator[psycopg.Connection]:
    """An autocommit connection to `database_url`."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def make_lease() -> Iterator[Callable[[str, str], Lease]]:
    """`make_lease(role, url)` begins a term of an hour, without an elector; the role's former one is over from then."""
    pools: list[WorkPool] = []

    def make(role: str, url: str) -> Lease:
        key = LeaseKey.of(role)
        with psycopg.connect(url, autocommit=True) as conn:
            row = conn.execute(NEXT_EPOCH, {"key": key, "role": role}).fetchone()
        assert row is not None
        pools.append(WorkPool(Settings(database_url=SecretStr(url))))
        return Lease(Term(key, row[0], clock() + 3600), "test", pools[-1], ttl=6.0)

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def leading() -> Callable[[Worker, Lease], AbstractContextManager[None]]:
    """`with leading(worker, lease):` runs a worker meanwhile, and asks it to stop at the end. Raises what it raised."""

    @contextmanager
    def context(worker: Worker, lease: Lease) -> Iterator[None]:
        with ThreadPoolExecutor(1) as thread:
            run = thread.submit(run_worker, worker, lease, lease._term)
            try:
                yield
            finally:
                lease._term.stop("the test is over")
            with suppress(LeaseLost):
                run.result()

    return context


@pytest.fixture
def leader(database_url: str, tmp_path: Path) -> Callable[[str], AbstractContextManager[Path]]:
    """`with leader(role) as log:` is a replica with this worker turned on, from when it leads. Its log is JSON."""

    @contextmanager
    def context(role: str) -> Iterator[Path]:
        log = tmp_path / f"{role}.log"
        inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
        settings = {"DATABASE_URL": database_url, toggle_name(role): "true", "LOG_FORMAT": "json", "OPS_LISTEN": "off"}
        with (
            psycopg.connect(database_url, autocommit=True) as conn,
            log.open("wb") as file,
            subprocess.Popen(
                [sys.executable, "-m", SERVICE, "run"],
                cwd=tmp_path,
                env=inherited | {f"{ENV_PREFIX}{name}": value for name, value in settings.items()},
                stderr=file,
            ) as replica,
        ):
            deadline = time.monotonic() + 30
            try:
                while State.LEADING not in {status.state for status in read_status(conn) if status.role == role}:
                    assert replica.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.02)
                yield log
                replica.terminate()
                assert replica.wait(40) == 0, log.read_text()
            finally:
                replica.kill()

    return context
