"""Row 2: somebody ends or disturbs the lease's session, while the process that leads is well."""

import time
from functools import partial
from typing import Any

import psycopg
import pytest

from laboratory.servers import wait_until
from laboratory.service import QUICK, ROLES, Fleet

INTERVAL, TTL = float(QUICK["INTERVAL_SECONDS"]), float(QUICK["TTL_SECONDS"])
SLACK = 0.5  # for a machine that is busy with something else

TERMINATE_HOLDERS = """
select pg_terminate_backend(pid) from (select distinct pid from pg_locks where locktype = 'advisory' and granted
   and database = (select oid from pg_database where datname = current_database())) as holder
"""
TERMINATE_ALL = """
select pg_terminate_backend(pid) from pg_stat_activity
 where application_name like 'acme_billing%' and datname = current_database()
"""
HOLDER_IN_A_HEARTBEAT = """
select pid from pg_stat_activity join pg_locks using (pid)
 where locktype = 'advisory' and granted and datname = current_database() and wait_event_type = 'Lock'
"""
LOCKS = "select objid from pg_locks where locktype = 'advisory' and pid = %s"
CANCEL_ALL = TERMINATE_ALL.replace("terminate", "cancel")

pytestmark = pytest.mark.slow

Figures = dict[str, list[float]]


def wait_for_losses(fleet: Fleet, count: int) -> None:
    wait_until(lambda: fleet.logs().count("lease.lost") >= count, 2, "the loss is noticed")


def no_locks(conn: psycopg.Connection[Any], pid: int) -> bool:
    return not conn.execute(LOCKS, [pid]).fetchall()


@pytest.mark.parametrize("statement", [TERMINATE_HOLDERS, TERMINATE_ALL], ids=["the holder's", "all of the service"])
def test_terminated_sessions_end_the_term_at_once_and_somebody_leads_again_within_ttl(
    fleet: Fleet, figures: Figures, statement: str
) -> None:
    fleet.line_up(standbys=2)
    with fleet.postgres.connect() as conn:
        for _ in range(4):
            lost = fleet.logs().count("lease.lost")
            at = time.monotonic()
            conn.execute(statement)
            wait_for_losses(fleet, lost + len(ROLES))
            figures["noticed"].append(time.monotonic() - at)
            for role in ROLES:
                figures[role].append(fleet.gap_after(role, at))
    assert max(figures["noticed"]) < INTERVAL, "a closed socket wakes the loop"
    assert max(figures["poller"]) < 2 * INTERVAL + SLACK
    assert max(figures["scheduler"] + figures["reconciler"]) < TTL + SLACK
    assert all(replica.process.poll() is None for replica in fleet.replicas)
    assert fleet.stop() == [0, 0, 0]
    fleet.assert_safe()


def test_a_cancelled_heartbeat_ends_the_term_for_nobody_knows_what_became_of_it(fleet: Fleet, figures: Figures) -> None:
    fleet.line_up()
    with fleet.postgres.connect() as conn, fleet.postgres.connect() as watch:
        for _ in range(3):
            held = fleet.holders()
            with conn.transaction():
                conn.execute("lock table acme_billing.lease in access exclusive mode")  # a heartbeat reads it
                (pid,) = wait_until(lambda: watch.execute(HOLDER_IN_A_HEARTBEAT).fetchone(), 2, "a heartbeat waits")
                at = time.monotonic()
                watch.execute("select pg_cancel_backend(%s)", [pid])
                wait_until(partial(no_locks, watch, pid), 1, "the locks are given back")
            for role in [role for role, holder in held.items() if holder == pid]:
                figures[role].append(fleet.gap_after(role, at))
    assert max(figures["poller"]) < 2 * INTERVAL + SLACK
    assert max(figures["scheduler"] + figures["reconciler"]) < TTL + SLACK
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()


def test_a_storm_of_cancels_never_makes_two_lead_and_is_recovered_from(fleet: Fleet, figures: Figures) -> None:
    fleet.line_up()
    with fleet.postgres.connect() as conn:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            conn.execute(CANCEL_ALL)
    fleet.wait_for_leaders()
    figures["the storm is over"].append(time.monotonic() - until)
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()
