"""The wall clock jumps by an hour: a replica's, then the server's. Leases are about durations, so nothing changes."""

import itertools
import json
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from laboratory.clocks import PostgresWithClock, WallClock
from laboratory.servers import HAProxy, Postgres
from laboratory.service import QUICK, ROLES, Fleet, Service

pytestmark = [pytest.mark.slow, pytest.mark.needs("cc")]

INTERVAL, TTL = 0.5, 3.0  # what QUICK makes of them
HOUR = 3600
BOUND = TTL + 2 * INTERVAL + 0.5  # half a second for a busy machine

_serial = itertools.count(1)


@pytest.fixture
def wall_clock(directory: Path) -> WallClock:
    return WallClock(directory / f"clock-{next(_serial)}")


@pytest.fixture
def clocked(directory: Path, service: Service, wall_clock: WallClock) -> Iterator[Postgres]:
    server = PostgresWithClock(directory / f"clocked-{next(_serial)}", wall_clock)
    server.start()
    service.prepare(server)
    yield server
    server.stop()


def test_an_hour_forwards_and_backwards_on_the_replicas_changes_nothing(
    fleet: Fleet, wall_clock: WallClock, figures: dict[str, list[float]]
) -> None:
    (leader,) = fleet.start(prefix=wall_clock.prefix)
    fleet.wait_for_leaders()
    (standby,) = fleet.start(prefix=wall_clock.prefix)
    fleet.wait_for_log("lease.standby", standby)
    for hours in (1, 0, -1, 0):
        wall_clock.move_to(hours * HOUR)
        fleet.wait_for_heartbeats(2)
    for role in ROLES:
        assert fleet.wait_for_leader(role) is leader
    assert [len(terms) for terms in fleet.assert_safe().terms.values()] == [1, 1, 1], fleet.logs()
    assert "session.lost" not in fleet.logs()
    # and a takeover goes on in the middle of one
    at = time.monotonic()
    leader.signal(signal.SIGKILL)
    wall_clock.move_to(HOUR)
    for role, gap in fleet.succession(leader, at).items():
        figures[f"{role} taken over"].append(gap)
        assert gap < BOUND, standby.log
    last_line = json.loads(standby.log.splitlines()[-1])
    assert datetime.fromisoformat(last_line["timestamp"]) - datetime.now(UTC) > timedelta(minutes=59), "it has jumped"
    assert fleet.stop() == [-signal.SIGKILL, 0], standby.log
    fleet.assert_safe()


def test_an_hour_forwards_and_backwards_on_the_server_at_most_ends_a_session(
    clocked: Postgres, service: Service, wall_clock: WallClock
) -> None:
    """The server counts `idle_session_timeout` on its wall clock: a leap forwards may end a session, seen in 1 of 4 runs."""
    with Fleet(service, clocked) as fleet:
        fleet.start()
        fleet.wait_for_leaders()
        (standby,) = fleet.start()
        fleet.wait_for_log("lease.standby", standby)
        for hours in (1, 0, -1, 0):
            wall_clock.move_to(hours * HOUR)
            fleet.wait_for_heartbeats(2)
            assert round(ahead(clocked) / HOUR) == hours
        fleet.wait_for_leaders()
        if "session.lost" not in fleet.logs():
            assert [len(terms) for terms in fleet.assert_safe().terms.values()] == [1, 1, 1], fleet.logs()
        assert fleet.logs().count("session.lost") <= 4, "two sessions, and two leaps forwards"
        assert fleet.stop() == [0, 0]
        fleet.assert_safe()


@pytest.mark.needs("haproxy")
@pytest.mark.parametrize("trial", range(2))
def test_a_silence_that_only_the_servers_clock_has_made_lets_nobody_begin_too_early(
    clocked: Postgres, service: Service, directory: Path, wall_clock: WallClock, trial: int
) -> None:
    long_trust = QUICK | {"TTL_SECONDS": "6"}  # 4 s
    proxy = HAProxy(directory / f"clocked-haproxy-{next(_serial)}", clocked, timeout=60).start()
    try:
        with Fleet(service, clocked) as fleet:
            (leader,) = fleet.start(url=proxy.url(), environment=long_trust)
            fleet.wait_for_leaders()
            (standby,) = fleet.start(environment=long_trust)
            fleet.wait_for_log("lease.standby", standby)
            assert proxy.process is not None
            at = time.monotonic()
            proxy.process.send_signal(signal.SIGSTOP)  # the leader does not learn what happens to its session
            wall_clock.move_to(HOUR)
            fleet.wait_for_heartbeats(2, sessions=1)  # the stand-by has seen a leader that was silent for an hour
            with clocked.connect() as conn:
                conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where starts_with(application_name, %s)",
                    [f"acme_billing {leader.pid}-"],
                )
            fleet.succession(leader, at)
            proxy.process.send_signal(signal.SIGCONT)
            fleet.assert_safe()
            fleet.stop()
            fleet.assert_safe()
    finally:
        proxy.stop()


def ahead(server: Postgres) -> float:
    """Seconds by which the server's clock is ahead of ours."""
    with server.connect() as conn:
        row = conn.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    assert row is not None
    return float(row[0]) - time.time()
