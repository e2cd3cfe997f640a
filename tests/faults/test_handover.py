"""The headline figures: three replicas with the default timing, and how long nobody works when the leader goes."""

import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from laboratory.servers import Postgres, wait_until
from laboratory.service import Fleet, Service

from .conftest import fresh

DEFAULTS: dict[str, str] = {}
TTL, INTERVAL = 6.0, 1.0

pytestmark = pytest.mark.slow


def trial(service: Service, postgres: Postgres, fault: signal.Signals) -> dict[str, float]:
    """Seconds without work for each role after a signal to its leader."""
    with Fleet(service, postgres) as fleet:
        fleet.start(3, environment=DEFAULTS)
        leaders = {leader.pid for leader in fleet.wait_for_leaders().values()}
        wait_until(lambda: len(sessions(fleet)) == 3, 15, "all replicas are connected")
        # a moment that is not bound to the heartbeats' phase
        at = time.monotonic()
        for replica in fleet.replicas:
            if replica.pid in leaders:
                replica.signal(fault)
        for role in ("poller", "scheduler", "reconciler"):
            wait_until(partial(leader_after, fleet, role, leaders), 15, f"another works as {role}")
        report = fleet.assert_safe()
        fleet.stop()
        fleet.assert_safe()
        return {role: report.gap(role, at) for role in report.terms}


def sessions(fleet: Fleet) -> list[object]:
    with fleet.postgres.connect() as conn:
        return conn.execute(
            "select pid from pg_stat_activity where application_name like 'acme_billing %' and datname = current_database()"
        ).fetchall()


def leader_after(fleet: Fleet, role: str, victims: set[int]) -> bool:
    leader = fleet.leader(role)
    return leader is not None and leader.pid not in victims


def measure(
    service: Service, server: Postgres, fault: signal.Signals, record: Callable[[str, object], None], at_once: int
) -> dict[str, list[float]]:
    with ThreadPoolExecutor(at_once) as pool:
        trials = list(pool.map(lambda _: trial(service, fresh(server, service), fault), range(5)))
    gaps = {role: sorted(gap[role] for gap in trials) for role in trials[0]}
    for role, found in gaps.items():
        figures = f"median {statistics.median(found):.3f} s, {found[0]:.3f} to {found[-1]:.3f} s, n={len(found)}"
        record(f"{fault.name} {role}", figures)
        print(f"{fault.name} {role}: {figures}")
    return gaps


def test_sigterm_of_the_leader_hands_over_well_within_an_interval(
    service: Service, postgres_18: Postgres, record_property: Callable[[str, object], None]
) -> None:
    gaps = measure(service, postgres_18, signal.SIGTERM, record_property, at_once=1)
    for role, found in gaps.items():
        assert statistics.median(found) < INTERVAL / 4, (role, found)


def test_sigkill_of_the_leader_hands_over_within_ttl_and_fenced_within_two_intervals(
    service: Service, postgres_18: Postgres, record_property: Callable[[str, object], None]
) -> None:
    gaps = measure(service, postgres_18, signal.SIGKILL, record_property, at_once=5)
    assert max(gaps["poller"]) < 2 * INTERVAL, gaps
    assert max(gaps["scheduler"]) < TTL, gaps
    assert max(gaps["reconciler"]) < TTL, gaps


def test_the_machines_own_postgresql_does_as_well(service: Service, postgres_system: Postgres) -> None:
    with Fleet(service, fresh(postgres_system, service)) as fleet:
        fleet.start(3)
        first = fleet.wait_for_leader("scheduler")
        first.signal(signal.SIGTERM)
        second = fleet.wait_for_leader("scheduler", other_than=first)
        second.signal(signal.SIGKILL)
        fleet.wait_for_leader("scheduler", other_than=second)
        fleet.stop()
        fleet.assert_safe()
