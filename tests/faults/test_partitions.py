"""Hosts that can't hear each other any more: no FIN, no RST, no error, only silence. Real namespaces, real TCP."""

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from laboratory.network import Host, Network, RemotePostgres
from laboratory.servers import embedded_binaries, wait_until
from laboratory.service import QUICK, ROLES, Fleet, Replica, Service

from .conftest import fresh

pytestmark = [pytest.mark.slow, pytest.mark.needs("root", "ip", "setpriv")]

INTERVAL, TTL, TRUST, KILL = 0.5, 3.0, 1.25, 2.25  # what QUICK makes of them
PATIENT = QUICK | {"TTL_SECONDS": "6"}  # trust 4 s
BOUND = TTL + 2 * INTERVAL + 0.5  # half a second for a busy machine
TRIALS = 3  # side by side, each with a database and two hosts of its own


@dataclass
class Trial:
    """A leader and a stand-by, each on a host of its own."""

    fleet: Fleet
    leader: Replica
    leader_host: Host
    standby: Replica
    standby_host: Host


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def server_host(network: Network) -> Host:
    return network.host()


@pytest.fixture(scope="module")
def server(directory: Path, server_host: Host) -> Iterator[RemotePostgres]:
    started = RemotePostgres(directory / "remote", embedded_binaries(), server_host)
    started.start("listen_addresses=" + server_host.address)
    # its directory is trusted, and so are its hosts
    (started.data / "pg_hba.conf").write_text("local all all trust\nhost all all 10.77.0.0/16 trust\n")
    with started.connect() as conn:
        conn.execute("select pg_reload_conf()")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def hosts(network: Network) -> list[Host]:
    return [network.host() for _ in range(2 * TRIALS)]


class Begin(Protocol):
    """Start a trial on each two hosts: the first of them leads all roles, the second stands by."""

    def __call__(self, hosts: list[Host], timing: Mapping[str, str] = QUICK) -> list[Trial]: ...


@pytest.fixture
def begin(service: Service, server: RemotePostgres, server_host: Host) -> Iterator[Begin]:
    with ExitStack() as stack:
        used: list[Host] = []

        def start(hosts: list[Host], timing: Mapping[str, str] = QUICK) -> list[Trial]:
            used.extend(hosts)
            fleets = [stack.enter_context(Fleet(service, fresh(server, service))) for _ in hosts[::2]]
            leaders = [run(fleet, host, timing) for fleet, host in zip(fleets, hosts[::2], strict=True)]
            for fleet in fleets:
                wait_until(partial(all_begun, fleet), 25, fleet.logs)
            standbys = [run(fleet, host, timing) for fleet, host in zip(fleets, hosts[1::2], strict=True)]
            for fleet, standby in zip(fleets, standbys, strict=True):
                fleet.wait_for_log("lease.standby", standby)
            return [Trial(*each) for each in zip(fleets, leaders, hosts[::2], standbys, hosts[1::2], strict=True)]

        yield start
        for host in (server_host, *used):
            host.heal()


def all_begun(fleet: Fleet) -> bool:
    return fleet.report().terms.keys() == set(ROLES)


def run(fleet: Fleet, host: Host, timing: Mapping[str, str] = QUICK) -> Replica:
    assert isinstance(fleet.postgres, RemotePostgres)
    url = fleet.postgres.remote_url()
    (replica,) = fleet.start(prefix=host.prefix, url=url, environment={**timing, "DATABASE_URL": url})
    return replica


def at_any_moment() -> None:
    """So that a fault does not always meet the heartbeats in the same phase."""
    time.sleep(random.uniform(0, INTERVAL))


def end(trial: Trial) -> None:
    """Whoever was in a statement when its host was cut off may have been killed; anybody else ends in order."""
    led, stood_by = trial.fleet.stop()
    assert led in (0, 1), trial.leader.log
    assert stood_by == 0, trial.standby.log
    trial.fleet.assert_safe()


def sessions_left(trial: Trial, count: int) -> bool:
    return len(trial.fleet.heartbeats()) == count


def stands_by_again(trial: Trial) -> bool:
    return trial.standby.log.count("lease.standby") == 2 * len(ROLES)


@pytest.mark.parametrize("fault", [Host.cut, Host.isolate, Host.mute, Host.deafen], ids=lambda fault: fault.__name__)
def test_a_leader_that_is_cut_off_stops_and_then_a_standby_leads(
    begin: Begin, hosts: list[Host], figures: dict[str, list[float]], fault: Callable[[Host], None]
) -> None:
    trials = begin(hosts)
    cut_at = []
    for trial in trials:
        at_any_moment()
        cut_at.append(time.monotonic())
        fault(trial.leader_host)
    for trial, at in zip(trials, cut_at, strict=True):
        assert trial.fleet.succession(trial.leader, at).keys() == set(ROLES)
        for role, (before, after) in trial.fleet.assert_safe().terms.items():
            figures[f"{role} stops"].append(before.last - at)
            figures[f"{role} led by another"].append(after.first - at)
            assert before.last - at < KILL, role
            assert after.first - at < BOUND, role
        trial.leader_host.heal()
    for trial in trials:
        end(trial)


def test_a_standby_that_is_cut_off_changes_nothing_and_stands_by_again(
    begin: Begin, hosts: list[Host], figures: dict[str, list[float]]
) -> None:
    trials = begin(hosts)
    for trial in trials:
        at_any_moment()
        trial.standby_host.isolate()
    for trial in trials:
        wait_until(partial(sessions_left, trial, 1), 10, "the server has ended the session")
        trial.fleet.wait_for_log("session.lost", trial.standby)
        trial.standby_host.heal()
    for trial in trials:
        wait_until(partial(stands_by_again, trial), 20, trial.fleet.logs)
        assert all(len(terms) == 1 for terms in trial.fleet.report().terms.values()), "somebody else led"
        at = time.monotonic()
        trial.leader.signal(signal.SIGTERM)
        for role, gap in trial.fleet.succession(trial.leader, at).items():
            figures[f"{role} handed to it"].append(gap)
        assert trial.leader.process.wait(10) == 0
        end(trial)


def test_without_the_database_nobody_works_and_afterwards_one_leads(
    begin: Begin, hosts: list[Host], server_host: Host, figures: dict[str, list[float]]
) -> None:
    trials = begin(hosts)
    at_any_moment()
    cut_at = time.monotonic()
    server_host.isolate()
    for trial in trials:
        wait_until(partial(sessions_left, trial, 0), 10, "the server has ended all sessions")
        for role, (term,) in trial.fleet.report().terms.items():
            figures[f"{role} stops"].append(term.last - cut_at)
            assert term.last - cut_at < KILL, role
    healed_at = time.monotonic()
    server_host.heal()
    for trial in trials:
        trial.fleet.succession(trial.leader, cut_at, timeout=25)
        for role, (_, after) in trial.fleet.assert_safe().terms.items():
            figures[f"{role} led again after healing"].append(after.first - healed_at)
        end(trial)


def test_a_partition_shorter_than_the_trust_changes_nothing(begin: Begin, hosts: list[Host]) -> None:
    # A heartbeat has 3.5 s from its start. TCP repeats it after 0.2, 0.4, 0.8, 1.6 and 3.2 s.
    trials = begin(hosts, PATIENT)
    for faults in (Host.cut, Host.mute, Host.deafen), (Host.isolate, Host.deafen, Host.cut):
        at_any_moment()
        for trial, fault in zip(trials, faults, strict=True):
            fault(trial.leader_host)
        time.sleep(2.5)  # so long they last
        for trial in trials:
            trial.leader_host.heal()
        for trial in trials:
            trial.fleet.wait_for_heartbeats()
    for trial in trials:
        assert [len(terms) for terms in trial.fleet.assert_safe().terms.values()] == [1, 1, 1], trial.leader.log
        assert set(trial.fleet.holders()) == set(ROLES)
        for log in (trial.leader.log, trial.standby.log):
            assert "session.lost" not in log
            assert "lease.lost" not in log
        assert trial.fleet.stop() == [0, 0]


def test_a_slow_and_lossy_network_makes_no_two_leaders(
    network: Network, begin: Begin, figures: dict[str, list[float]]
) -> None:
    trials = begin([network.host(delay=0.1, loss=0.02) for _ in range(2 * TRIALS)], PATIENT)
    for what, number in ("handed over", signal.SIGTERM), ("taken over", signal.SIGKILL):
        at = time.monotonic()
        for trial in trials:
            trial.leader.signal(number)
        for trial in trials:
            wait_until(partial(all_led_by_another, trial, at), 25, trial.fleet.logs)
            for role, gap in led_by_another(trial, at).items():
                figures[f"{role} {what}"].append(gap)
                assert gap < 6 + 2 * INTERVAL + 4, "twenty ways to the server and back, some of them twice"
        # the stand-by leads; a new one comes in the old leader's place
        for trial in trials:
            trial.leader, trial.standby = trial.standby, run(trial.fleet, trial.leader_host, PATIENT)
            trial.leader_host, trial.standby_host = trial.standby_host, trial.leader_host
        for trial in trials:
            trial.fleet.wait_for_log("lease.standby", trial.standby)
    for trial in trials:
        trial.fleet.stop()
        trial.fleet.assert_safe()


def all_led_by_another(trial: Trial, at: float) -> bool:
    return led_by_another(trial, at).keys() == set(ROLES)


def led_by_another(trial: Trial, at: float) -> dict[str, float]:
    """The roles in which somebody else than the leader has begun to work; seconds without work before that."""
    found = {}
    for role, terms in trial.fleet.report().terms.items():
        before = [term for term in terms if term.pid == trial.leader.pid]
        after = [term for term in terms if term.first > at and term.pid != trial.leader.pid]
        if before and after:
            found[role] = after[0].first - before[-1].last
    return found
