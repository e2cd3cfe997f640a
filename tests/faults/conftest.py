"""Servers and an installed service for all trials; a fresh database for each test."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from laboratory.servers import PgBouncer, Postgres, embedded_binaries
from laboratory.service import Fleet, Service, install

_serial = itertools.count(1)


@pytest.fixture(scope="session")
def service(bake: Callable[..., Path]) -> Service:
    """A project with recording workers, installed with all its extras."""
    return install(bake())


@pytest.fixture(scope="session")
def postgres_18(directory: Path) -> Iterator[Postgres]:
    server = Postgres(directory / "postgres-18", embedded_binaries()).start()
    yield server
    server.stop()


@pytest.fixture
def postgres(postgres_18: Postgres, service: Service) -> Postgres:
    """PostgreSQL 18 with a fresh, migrated database of this test's own."""
    return fresh(postgres_18, service)


@pytest.fixture
def own_postgres(directory: Path, service: Service) -> Iterator[Postgres]:
    """A server that a test may stop and kill."""
    server = Postgres(directory / f"own-{next(_serial)}", embedded_binaries()).start()
    service.prepare(server)
    yield server
    server.stop()


def fresh(server: Postgres, service: Service) -> Postgres:
    """The same server, seen through a new database."""
    name = f"trial_{next(_serial)}"
    with server.connect() as conn:
        conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    subject = server.with_database(name)
    service.prepare(subject)
    return subject


@pytest.fixture
def fleet(service: Service, postgres: Postgres) -> Iterator[Fleet]:
    with Fleet(service, postgres) as started:
        yield started


@pytest.fixture
def pgbouncer(directory: Path, postgres: Postgres) -> Iterator[Callable[..., PgBouncer]]:
    """`pgbouncer(mode, pool_size, **settings)` starts one in front of this test's database."""
    started: list[PgBouncer] = []

    def start(mode: str, pool_size: int, **settings: Any) -> PgBouncer:
        bouncer = PgBouncer(directory / f"pgbouncer-{next(_serial)}", postgres, mode, pool_size, **settings)
        started.append(bouncer.start())
        return bouncer

    yield start
    for bouncer in started:
        bouncer.stop()


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Iterator[dict[str, list[float]]]:
    """Seconds without work, measured by a test: name to one value a trial. Told at its end."""
    measured: defaultdict[str, list[float]] = defaultdict(list)
    yield measured
    for name, values in measured.items():
        found = sorted(values)
        text = f"median {statistics.median(found):.3f} s, {found[0]:.3f} to {found[-1]:.3f} s, n={len(found)}"
        record_property(name, text)
        print(f"{name}: {text}")
