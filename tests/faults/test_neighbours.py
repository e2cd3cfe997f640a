"""What else lives in the database: maintenance that stand-bys must not hold up, and programs with the same lock."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from laboratory.servers import Postgres, wait_until
from laboratory.service import QUICK, Fleet, Service

from .conftest import fresh

pytestmark = pytest.mark.slow

INTERVAL, TTL = 0.5, 3.0  # what QUICK makes of them
ROWS = 1000
WATCHED = 60.0  # seconds of standing by


def test_vacuum_and_concurrent_indexes_run_unhindered_beside_three_standbys(
    fleet: Fleet, figures: dict[str, list[float]]
) -> None:
    fleet.start(1)
    fleet.wait_for_leaders()
    for standby in fleet.start(3):
        fleet.wait_for_log("lease.standby", standby)
    with fleet.postgres.connect() as conn:
        conn.execute("create table neighbour (id int)")
        until = time.monotonic() + WATCHED
        while time.monotonic() < until:
            fleet.wait_for_heartbeats(sessions=1)
            conn.execute("insert into neighbour select generate_series(1, %s)", [ROWS])
            conn.execute("delete from neighbour")
            started = time.monotonic()
            # it waits for everybody who has an older snapshot
            conn.execute("create index concurrently by_id on neighbour (id)")
            figures["create index concurrently"].append(time.monotonic() - started)
            conn.execute("drop index concurrently by_id")
            # the poller's own transactions may, for as long as each takes
            wait_until(lambda: rows_held_back(conn) == 0, 2 * INTERVAL, "VACUUM may remove all dead rows")
            wait_until(lambda: not snapshots(conn), INTERVAL, "no lease session has a snapshot")
        # and what this test measures can be seen: a snapshot that stays does hold rows back
        conn.execute("insert into neighbour select generate_series(1, %s)", [ROWS])
        with fleet.postgres.connect() as other, other.transaction():
            other.execute("set transaction isolation level repeatable read")
            other.execute("select from neighbour")
            conn.execute("delete from neighbour")
            assert rows_held_back(conn) == ROWS
    assert max(figures["create index concurrently"]) < 2, figures
    assert "session.lost" not in fleet.logs()
    assert fleet.stop() == [0] * 4
    fleet.assert_safe()


def rows_held_back(conn: psycopg.Connection[Any]) -> int:
    """Dead rows that VACUUM had to leave in place, because somebody might still see them."""
    told: list[str] = []

    def listen(notice: psycopg.errors.Diagnostic) -> None:
        told.append(notice.message_primary or "")

    conn.add_notice_handler(listen)
    conn.execute("vacuum (verbose) neighbour")
    conn.remove_notice_handler(listen)
    found = re.search(r"tuples: .* (\d+) are dead but not yet removable", "\n".join(told))
    assert found is not None, told
    return int(found[1])


def snapshots(conn: psycopg.Connection[Any]) -> int:
    """How many lease sessions have one at this moment."""
    row = conn.execute(
        "select count(*) from pg_stat_activity where application_name like 'acme_billing %'"
        " and datname = current_database() and backend_xmin is not null"
    ).fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def foreign_holder(postgres: Postgres, key: int) -> Iterator[psycopg.Connection[Any]]:
    """Another program that has the lock."""
    with psycopg.connect(postgres.url(), autocommit=True, application_name="other-program") as conn:
        assert conn.execute("select pg_try_advisory_lock(%s)", [key]).fetchone() == (True,)
        yield conn


def lock_of(service: Service, postgres: Postgres, role: str) -> int:
    """The key of a role, as the command line tells it."""
    done = service.call("keys", url=postgres.url())
    (line,) = (line for line in done.stdout.splitlines() if role in line)
    return next(int(word) for word in line.split() if word.isdigit())


def test_another_program_with_the_same_key_is_reported_and_never_taken_for_a_leader(
    fleet: Fleet, service: Service, figures: dict[str, list[float]]
) -> None:
    key = lock_of(service, fleet.postgres, "scheduler")
    with foreign_holder(fleet.postgres, key) as other:
        replicas = fleet.start(2)
        for replica in replicas:
            fleet.wait_for_log("lease.collision", replica)
            assert "other-program" in replica.log
        for role in ("poller", "reconciler"):
            fleet.wait_for_leader(role)
        assert "scheduler" not in fleet.report().terms
        done = service.call("doctor", url=fleet.postgres.url(), **{f"ACME_BILLING_{k}": v for k, v in QUICK.items()})
        assert done.returncode != 0
        assert "other-program" in done.stdout
        assert str(key) in done.stdout
        assert "lease key base" in done.stdout
        at = time.monotonic()
        other.execute("select pg_advisory_unlock(%s)", [key])
        fleet.wait_for_leader("scheduler")
        figures["scheduler led after the other let go"].append(fleet.report().terms["scheduler"][0].first - at)
        assert fleet.report().terms["scheduler"][0].first - at < 2 * INTERVAL + 0.5
    assert all(replica.log.count("lease.collision") == 1 for replica in replicas), "one line, not one a heartbeat"
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()


def test_the_same_key_in_another_database_of_the_server_is_no_conflict(
    fleet: Fleet, service: Service, postgres_18: Postgres
) -> None:
    elsewhere = fresh(postgres_18, service)
    key = lock_of(service, fleet.postgres, "scheduler")
    with Fleet(service, elsewhere) as other_fleet, foreign_holder(postgres_18.with_database("postgres"), key):
        fleet.start(2)
        other_fleet.start(1)
        for each in (fleet, other_fleet):
            each.wait_for_leaders()
        done = service.call("doctor", url=fleet.postgres.url())
        assert "no other program uses them" in done.stdout
        (lone,) = other_fleet.replicas
        lone.signal(signal.SIGKILL)  # what happens there does not matter here
        lone.process.wait()
        assert [len(terms) for terms in fleet.report().terms.values()] == [1, 1, 1]
        assert fleet.stop() == [0, 0]
        assert "lease.collision" not in fleet.logs() + other_fleet.logs()
        fleet.assert_safe()
