"""Row 12: twenty stand-bys hear at once that a lease is free."""

import re
import signal
import time
from collections.abc import Callable

import pytest

from laboratory.servers import Postgres, throughout
from laboratory.service import QUICK, Fleet, Replica, Service

INTERVAL = float(QUICK["INTERVAL_SECONDS"])
STANDBYS = 20
BUSY_START = 60  # seconds for so many processes to start on two cores

STATEMENT = re.compile(r"^(\d+\.\d+)\|acme_billing (\S+)\|LOG:  (?:statement|execute)", re.MULTILINE)

pytestmark = pytest.mark.slow


def statements(postgres: Postgres, since: float, seconds: float) -> list[str]:
    """Who sent a statement on a lease session in a stretch of time, once for each, by the server's own log."""
    found = STATEMENT.findall(postgres.log.read_text())
    return [name for at, name in found if since <= float(at) < since + seconds]


def watch(fleet: Fleet, leader: Replica) -> float:
    """A second in which nothing happens, for the server's log; its start, by the wall clock."""
    started = time.time()
    throughout(1, lambda: leader.process.poll() is None, "the leader lives")
    return started


def test_of_twenty_stand_bys_one_wins_and_the_herd_stays_bounded(
    service: Service,
    own_postgres: Postgres,
    figures: dict[str, list[float]],
    record_property: Callable[[str, object], None],
) -> None:
    with own_postgres.connect() as conn:
        for setting in ("log_statement = 'all'", "log_line_prefix = '%n|%a|'"):
            conn.execute(f"alter system set {setting}")
        conn.execute("select pg_reload_conf()")
    with Fleet(service, own_postgres) as fleet:
        fleet.start(roles=("scheduler",))
        leader = fleet.wait_for_leader("scheduler")
        peace: list[int] = []
        herd: list[int] = []
        for standby in fleet.start(STANDBYS, roles=("scheduler",)):
            fleet.wait_for_log("lease.standby", standby, timeout=BUSY_START)
        for _ in range(3):
            peace.append(len(statements(own_postgres, watch(fleet, leader), 1)))
            at, released_at = time.monotonic(), time.time()
            leader.signal(signal.SIGTERM)
            figures["without work"].append(fleet.gap_after("scheduler", at))
            leader.process.wait(5)
            leader = fleet.wait_for_leader("scheduler", other_than=leader)
            watch(fleet, leader)
            herd.append(len(statements(own_postgres, released_at, 1)))
        assert fleet.logs().count("lease.acquired") == 4, "each release was won by one"
        record_property("statements in a second of peace, and in the second after a release", f"{peace}, {herd}")
        print(f"statements in a second of peace {peace}, in the second after a release {herd}")
        assert max(figures["without work"]) < INTERVAL / 2
        assert max(herd) < STANDBYS / INTERVAL + 2 * STANDBYS, "one more look for each, and some slack"
        assert fleet.stop() == [0] * (STANDBYS + 1)
        fleet.assert_safe()
