"""The trap: behind a pooler in transaction mode two replicas are both told `true`. Real PgBouncer, each mode."""

import contextlib
import signal
from collections.abc import Callable

import pytest

from laboratory.servers import PgBouncer, Postgres
from laboratory.service import QUICK, Fleet, Service
from laboratory.traffic import traffic

pytestmark = pytest.mark.needs("pgbouncer")

Start = Callable[..., PgBouncer]


@pytest.mark.parametrize("load", [0, 8], ids=["idle", "busy"])
@pytest.mark.parametrize("pool_size", [1, 20])
@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_nobody_leads_through_a_pooler_that_multiplexes_and_the_log_says_why(
    fleet: Fleet, postgres: Postgres, pgbouncer: Start, mode: str, pool_size: int, load: int
) -> None:
    bouncer = pgbouncer(mode, pool_size)
    with traffic(postgres, bouncer, load) if load else contextlib.nullcontext():
        replicas = fleet.start(2, url=bouncer.url())
        for replica in replicas:
            fleet.wait_for_log("session.refused", replica, timeout=20)
            assert "multiplexed" in replica.log
            assert "ACME_BILLING_LEASE_DATABASE_URL" in replica.log
        assert fleet.report().terms == {}
        assert fleet.holders() == {}, "a lock was left behind"
        assert fleet.stop() == [0, 0]
    assert "lease.acquired" not in fleet.logs()


def test_nor_where_the_pooler_resets_the_session_after_each_transaction(fleet: Fleet, pgbouncer: Start) -> None:
    bouncer = pgbouncer("transaction", 20, server_reset_query_always=1)
    (replica,) = fleet.start(1, url=bouncer.url())
    fleet.wait_for_log("session.refused", replica, timeout=20)
    assert fleet.report().terms == {}


@pytest.mark.parametrize("pool_size", [1, 20])
def test_in_session_mode_one_leads_and_is_told_of_the_pooler(fleet: Fleet, pgbouncer: Start, pool_size: int) -> None:
    bouncer = pgbouncer("session", pool_size)
    replicas = fleet.start(2 if pool_size > 1 else 1, url=bouncer.url())
    leader = fleet.wait_for_leader("scheduler", timeout=25)
    assert "session.pooled" in leader.log
    if pool_size > 1:
        fleet.wait_for_log("lease.standby")
        leader.signal(signal.SIGTERM)
        fleet.wait_for_leader("scheduler", other_than=leader)
    assert fleet.stop() == [0] * len(replicas)
    fleet.assert_safe()


def test_a_pooler_switched_to_transaction_mode_while_leading_ends_the_lead(
    fleet: Fleet, postgres: Postgres, pgbouncer: Start
) -> None:
    bouncer = pgbouncer("session", 20)
    with traffic(postgres, bouncer, 4):
        fleet.start(2, url=bouncer.url())
        fleet.wait_for_leader("scheduler")
        bouncer.reload(pool_mode="transaction")
        # PgBouncer keeps a client's server until it is released, so its sessions have to be made anew
        with postgres.connect() as conn:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'acme_billing %'"
            )
        fleet.wait_for_log("session.refused", timeout=20)
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()


def test_doctor_names_the_pooler_and_the_setting(service: Service, postgres: Postgres, pgbouncer: Start) -> None:
    bouncer = pgbouncer("transaction", 20)
    done = service.call("doctor", url=postgres.url(), ACME_BILLING_LEASE_DATABASE_URL=bouncer.url(), **PREFIXED)
    assert done.returncode != 0
    assert "multiplexed" in done.stdout
    assert "ACME_BILLING_LEASE_DATABASE_URL" in done.stdout


PREFIXED = {f"ACME_BILLING_{name}": value for name, value in QUICK.items()}
