"""Row 3: the database restarts, crashes, and stays away for a while."""

import time
from collections.abc import Callable, Iterator

import pytest

from laboratory.servers import Postgres, throughout
from laboratory.service import QUICK, ROLES, Fleet, Service

INTERVAL, TTL = float(QUICK["INTERVAL_SECONDS"]), float(QUICK["TTL_SECONDS"])
RECONNECT = 3.0  # a server that comes back is found within so many seconds
SLACK = 0.5  # for a machine that is busy with something else

pytestmark = pytest.mark.slow

Figures = dict[str, list[float]]


@pytest.fixture
def own_fleet(service: Service, own_postgres: Postgres) -> Iterator[Fleet]:
    with Fleet(service, own_postgres) as started:
        yield started


def interrupt(fleet: Fleet, stop: Callable[[], None], away: float, figures: Figures) -> None:
    """Stop the server, watch that nobody works while it is away, start it, and wait for leaders."""
    fleet.wait_for_leader("scheduler")
    stopped_at = time.monotonic()
    stop()
    down_at = time.monotonic()
    throughout(away, lambda: all(replica.process.poll() is None for replica in fleet.replicas), "no process ends")
    last = {role: terms[-1].last for role, terms in fleet.report().terms.items()}
    fleet.postgres.start()
    up_at = time.monotonic()
    for role in ROLES:
        figures["stops working"].append(last[role] - stopped_at)
        assert last[role] < down_at + INTERVAL, "the end of the session is noticed at once"
        fleet.gap_after(role, down_at)
        figures[f"{role} works again"].append(
            next(t.first for t in fleet.report().terms[role] if t.first > down_at) - up_at
        )


@pytest.mark.parametrize("how", [Postgres.stop, Postgres.stop_at_once, Postgres.kill], ids=lambda how: how.__name__)
def test_a_restart_of_the_server_pauses_all_work_and_nothing_else(
    own_fleet: Fleet, figures: Figures, how: Callable[[Postgres], None]
) -> None:
    own_fleet.line_up()
    for away in (0, 3):
        interrupt(own_fleet, lambda: how(own_fleet.postgres), away, figures)
    for name, seconds in figures.items():
        assert max(seconds) < RECONNECT + TTL + SLACK, name
    assert all(replica.process.poll() is None for replica in own_fleet.replicas)
    assert own_fleet.stop() == [0, 0]
    own_fleet.assert_safe()


def test_a_server_that_is_away_for_half_a_minute_is_waited_for(own_fleet: Fleet, figures: Figures) -> None:
    own_fleet.line_up()
    interrupt(own_fleet, own_fleet.postgres.kill, 30, figures)
    for name, seconds in figures.items():
        assert max(seconds) < RECONNECT + TTL + SLACK, name
    assert own_fleet.stop() == [0, 0]
    own_fleet.assert_safe()


def test_a_replica_asked_to_stop_while_the_server_is_away_stops(own_fleet: Fleet) -> None:
    own_fleet.line_up()
    own_fleet.postgres.kill()
    assert own_fleet.stop() == [0, 0]
    own_fleet.postgres.start()
    own_fleet.assert_safe()
