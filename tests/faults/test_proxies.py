"""A TCP proxy in between: it cuts idle connections, restarts, freezes, or stays up while the server is frozen."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from laboratory.servers import HAProxy, Postgres, wait_until
from laboratory.service import ROLES, Fleet, Service

pytestmark = [pytest.mark.slow, pytest.mark.needs("haproxy")]

INTERVAL, TTL, TRUST, KILL = 0.5, 3.0, 1.25, 2.25  # what QUICK makes of them
BOUND = TTL + 2 * INTERVAL + 0.5  # half a second for a busy machine
TRIALS = 3

_serial = itertools.count(1)

Start = Callable[..., HAProxy]


@pytest.fixture
def haproxy(directory: Path, postgres: Postgres) -> Iterator[Start]:
    """`haproxy(timeout)` starts one in front of this test's database."""
    started: list[HAProxy] = []

    def start(timeout: float, server: Postgres = postgres) -> HAProxy:
        proxy = HAProxy(directory / f"haproxy-{next(_serial)}", server, timeout)
        started.append(proxy.start())
        return proxy

    yield start
    for proxy in started:
        proxy.stop()


def test_an_idle_timeout_longer_than_the_interval_changes_nothing(fleet: Fleet, haproxy: Start) -> None:
    url = haproxy(2 * INTERVAL).url()
    (leader,) = fleet.start(1, url=url)
    fleet.wait_for_leaders()
    (standby,) = fleet.start(1, url=url)
    fleet.wait_for_log("lease.standby", standby)
    fleet.wait_for_heartbeats(6)
    assert "session.lost" not in fleet.logs()
    assert [len(terms) for terms in fleet.report().terms.values()] == [1, 1, 1], leader.log
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()


def test_an_idle_timeout_shorter_than_the_interval_is_told_and_makes_no_two_leaders(
    fleet: Fleet, haproxy: Start
) -> None:
    replicas = fleet.start(2, url=haproxy(INTERVAL / 2).url())
    for replica in replicas:
        fleet.wait_for_log("session.lost", replica)
    # a term lasts until the first silence, and epochs go on rising from one to the next
    wait_until(lambda: len(fleet.report().terms.get("scheduler", [])) >= 3, 30, "three terms")
    fleet.stop()
    fleet.assert_safe()


def test_a_restarted_proxy_costs_no_more_than_a_takeover(
    fleet: Fleet, haproxy: Start, figures: dict[str, list[float]]
) -> None:
    proxy = haproxy(60)
    replicas = fleet.start(2, url=proxy.url())
    fleet.wait_for_leaders()
    for replica in replicas:
        fleet.wait_for_log("session.opened", replica)
    for _ in range(TRIALS):
        fleet.wait_for_heartbeats()
        at = time.monotonic()
        proxy.stop()
        proxy.start()
        wait_until(partial(all_lead_since, fleet, at), BOUND, fleet.logs)
        report = fleet.assert_safe()
        for role in ROLES:
            figures[f"{role} again after a restart"].append(report.gap(role, at))
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()


@pytest.mark.parametrize("trial", range(2))
def test_a_frozen_proxy_ends_the_lead_behind_it_and_a_direct_replica_takes_over(
    fleet: Fleet, haproxy: Start, figures: dict[str, list[float]], trial: int
) -> None:
    proxy = haproxy(60)
    (leader,) = fleet.start(1, url=proxy.url())
    fleet.wait_for_leaders()
    (standby,) = fleet.start(1)
    fleet.wait_for_log("lease.standby", standby)
    at = time.monotonic()
    assert proxy.process is not None
    proxy.process.send_signal(signal.SIGSTOP)
    try:
        fleet.succession(leader, at)
    finally:
        proxy.process.send_signal(signal.SIGCONT)
    for role, (before, after) in fleet.assert_safe().terms.items():
        figures[f"{role} stops"].append(before.last - at)
        figures[f"{role} led by another"].append(after.first - at)
        assert before.last - at < KILL, role
        assert after.first - at < BOUND, role
    assert "no answer within" in leader.log
    # what was in the proxy's buffers arrives now, and must not bring the old term back
    wait_until(lambda: leader.log.count("lease.standby") >= len(ROLES), 15, "the old leader stands by")
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()


@pytest.mark.parametrize("trial", range(2))
def test_a_proxy_whose_server_is_frozen_is_given_up_by_the_heartbeat_itself(
    service: Service, own_postgres: Postgres, haproxy: Start, figures: dict[str, list[float]], trial: int
) -> None:
    with Fleet(service, own_postgres) as fleet:
        proxy = haproxy(60, own_postgres)
        # work would hang as well, and its process be ended: here only the lease is looked at
        replicas = fleet.start(2, url=proxy.url(), roles=("scheduler",))
        leader = fleet.wait_for_leader("scheduler")
        for replica in replicas:
            fleet.wait_for_log("session.opened", replica)
        at = time.monotonic()
        frozen = processes_of(own_postgres)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            fleet.wait_for_log("no answer within", leader)
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        thawed_at = time.monotonic()
        (term,) = fleet.report().terms["scheduler"]
        figures["scheduler stops"].append(term.last - at)
        assert term.last - at < TRUST + 0.25
        wait_until(lambda: len(fleet.report().terms["scheduler"]) == 2, 15, "somebody leads again")
        figures["scheduler led after the thaw"].append(fleet.report().terms["scheduler"][1].first - thawed_at)
        assert fleet.stop() == [0, 0]
        fleet.assert_safe()


def all_lead_since(fleet: Fleet, at: float) -> bool:
    terms = fleet.report().terms
    return all(any(term.first > at and term.units > 3 for term in terms[role]) for role in ROLES)


def processes_of(postgres: Postgres) -> list[int]:
    """The postmaster and its children."""
    assert postgres.process is not None
    children = Path(f"/proc/{postgres.process.pid}/task/{postgres.process.pid}/children").read_text().split()
    return [postgres.process.pid, *map(int, children)]
