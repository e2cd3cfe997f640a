"""Streaming replicas: a hot standby grants the same lock on its own, and a promotion may lose what was last written."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laboratory.servers import Postgres, Standby, wait_until
from laboratory.service import QUICK, ROLES, Fleet, Service

pytestmark = pytest.mark.slow

INTERVAL, TTL, HORIZON = 0.5, 3.0, 2.375  # what QUICK makes of them
BOUND = TTL + 2 * INTERVAL + 0.5  # half a second for a busy machine
SECOND_TIMELINE = 1 << 32  # epochs of the first are below

_serial = itertools.count(1)


@pytest.fixture
def primary(own_postgres: Postgres) -> Postgres:
    return own_postgres


@pytest.fixture
def standby(directory: Path, primary: Postgres) -> Iterator[Standby]:
    server = Standby(directory / f"standby-{next(_serial)}", primary)
    server.start()
    yield server
    server.stop()


def both(first: Postgres, second: Postgres) -> str:
    """A URL that lists two servers."""
    return f"postgresql://postgres@{first.host}:{first.port},{second.host}:{second.port}/{first.database}"


def lead(fleet: Fleet, url: str) -> None:
    """Start a replica that leads all roles, and another that stands by."""
    environment = QUICK | {"DATABASE_URL": url + "?target_session_attrs=read-write"}
    fleet.start(1, url=url, environment=environment)
    fleet.wait_for_leaders()
    (second,) = fleet.start(1, url=url, environment=environment)
    fleet.wait_for_log("lease.standby", second)


def wait_for_terms_after(fleet: Fleet, at: float, timeout: float) -> dict[str, float]:
    """Wait until all roles are led again; for each the time from then to its new term."""

    def found() -> dict[str, float] | None:
        terms = fleet.report().terms
        new = {role: [term for term in terms[role] if term.first > at and term.units >= 3] for role in ROLES}
        return {role: new[role][0].first - at for role in ROLES} if all(new.values()) else None

    return wait_until(found, timeout, lambda: f"all roles are led again: {fleet.logs()[-6000:]}")  # type: ignore[no-any-return]


def test_nobody_leads_on_a_hot_standby_and_the_log_says_why(
    service: Service, primary: Postgres, standby: Standby
) -> None:
    with Fleet(service, primary) as fleet:
        replicas = fleet.start(2, url=standby.url(), environment=QUICK | {"DATABASE_URL": standby.url()})
        for replica in replicas:
            fleet.wait_for_log("session.unreachable", replica)
            assert "read-only" in replica.log or "hot standby" in replica.log
        with standby.connect() as conn:
            assert conn.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)
        assert all(replica.process.poll() is None for replica in replicas), "it may be promoted"
        standby.promote()
        wait_until(lambda: fleet.report().terms.keys() == set(ROLES), 25, lambda: f"they lead there: {fleet.logs()}")
        assert all(term.epoch > SECOND_TIMELINE for terms in fleet.report().terms.values() for term in terms)
        assert fleet.stop() == [0, 0]


def test_doctor_says_that_a_hot_standby_can_not_lead(service: Service, standby: Standby) -> None:
    done = service.call("doctor", url=standby.url())
    assert done.returncode != 0
    assert "hot standby" in done.stdout


@pytest.mark.parametrize("trial", range(2))
def test_a_promotion_beside_the_living_primary_moves_nobody_until_that_one_ends(
    service: Service, primary: Postgres, standby: Standby, figures: dict[str, list[float]], trial: int
) -> None:
    with Fleet(service, primary) as fleet:
        lead(fleet, both(primary, standby))
        standby.has_replayed(primary)
        standby.promote()
        # a lease can't cover two primaries: whoever finds the first one goes on there
        fleet.wait_for_heartbeats(2)
        assert len(fleet.heartbeats()) == 2
        assert [len(terms) for terms in fleet.assert_safe().terms.values()] == [1, 1, 1]
        at = time.monotonic()
        primary.stop() if trial % 2 else primary.kill()
        for role, took in wait_for_terms_after(fleet, at, 15).items():
            figures[f"{role} on the new primary"].append(took)
            if role != "poller":  # its writes are fenced, and its server was another
                assert took >= HORIZON
            assert took < BOUND
        fleet.postgres = standby
        for role, terms in fleet.report().terms.items():
            assert terms[0].epoch < SECOND_TIMELINE < terms[-1].epoch, role
        assert fleet.stop() == [0, 0]
        fleet.assert_safe()


def test_a_demoted_primary_that_is_listed_first_is_passed_over(
    service: Service, primary: Postgres, standby: Standby
) -> None:
    with Fleet(service, primary) as fleet:
        lead(fleet, both(primary, standby))
        standby.has_replayed(primary)
        at = time.monotonic()
        primary.stop()
        standby.promote()
        (primary.data / "standby.signal").touch()
        primary.start(f"primary_conninfo=host={standby.host} port={standby.port} user=postgres")
        try:
            wait_for_terms_after(fleet, at, 20)
            assert not fleet.heartbeats()
            fleet.postgres = standby
            assert len(fleet.heartbeats()) == 2
            # and those who begin now find their way as well
            (late,) = fleet.start(1, url=both(primary, standby))
            fleet.wait_for_log("lease.standby", late)
            assert fleet.stop() == [0, 0, 0]
            fleet.assert_safe()
        finally:
            primary.stop()


@pytest.mark.parametrize("trial", range(2))
def test_a_fail_over_that_lost_the_last_epoch_waits_and_still_counts_on(
    service: Service, primary: Postgres, standby: Standby, figures: dict[str, list[float]], trial: int
) -> None:
    with Fleet(service, primary) as fleet:
        lead(fleet, both(primary, standby))
        # the replica's last news: all roles were released cleanly
        assert fleet.stop() == [0, 0]
        last_news = epochs(primary)
        assert all(released for _, released in last_news.values())
        standby.has_replayed(primary)
        standby.stop()
        lead(fleet, both(primary, standby))
        lost = {role: terms[-1].epoch for role, terms in fleet.report().terms.items()}
        assert all(lost[role] > last_news[role][0] for role in ROLES)
        at = time.monotonic()
        primary.kill()
        standby.start()
        assert epochs(standby) == last_news, "it knows nothing of the terms that came after"
        standby.promote()
        promoted_at = time.monotonic()
        for role, took in wait_for_terms_after(fleet, at, 25).items():
            figures[f"{role} led after the promotion"].append(took - (promoted_at - at))
            if role != "poller":
                assert took - (promoted_at - at) > HORIZON - 0.5, "a clean end on another timeline proves nothing"
        assert fleet.logs().count("lease.takeover_wait") >= 2
        fleet.postgres = standby
        for role, terms in fleet.report().terms.items():
            assert terms[-1].epoch > max(lost[role], SECOND_TIMELINE)
        assert fleet.stop()[2:] == [0, 0]
        fleet.assert_safe()


def epochs(server: Postgres) -> dict[str, tuple[int, bool]]:
    with server.connect() as conn:
        rows = conn.execute("select role, epoch, released_at is not null from acme_billing.lease").fetchall()
    return {role: (epoch, released) for role, epoch, released in rows}
