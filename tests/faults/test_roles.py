"""The role that a replica logs in as: settings that would end its session, privileges that it lacks, no free slot."""

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from laboratory.servers import Postgres, embedded_binaries, wait_until
from laboratory.service import QUICK, Fleet, Service

pytestmark = pytest.mark.slow

INTERVAL, TTL, HORIZON = 0.5, 3.0, 2.375  # what QUICK makes of them
BOUND = TTL + 2 * INTERVAL + 0.5  # half a second for a busy machine

_serial = itertools.count(1)

#: All that `run` needs. Whoever migrates owns the schema; this role owns nothing.
GRANTS = """
grant usage on schema acme_billing to {role};
grant select on acme_billing.migration to {role};
grant select, insert, update on acme_billing.lease to {role};
"""
#: What the laboratory's poller needs for its own writes.
WORK_GRANTS = """
grant select, insert on public.fenced_writes to {role};
grant usage on sequence public.fenced_writes_id_seq to {role};
"""

Make = Callable[..., str]


@pytest.fixture
def make_role(postgres: Postgres) -> Iterator[Make]:
    """`make_role(setting=value, ...)` makes a role with the minimal grants and returns its URL."""
    made: list[sql.Identifier] = []

    def make(**settings: str) -> str:
        name = f"replica_{postgres.database}_{next(_serial)}"
        role = sql.Identifier(name)
        made.append(role)
        with postgres.connect() as conn:
            conn.execute(sql.SQL("create role {role} login").format(role=role))
            conn.execute(sql.SQL(GRANTS + WORK_GRANTS).format(role=role))
            for setting, value in settings.items():
                conn.execute(
                    sql.SQL("alter role {} set {} = {}").format(role, sql.Identifier(setting), sql.Literal(value))
                )
        return postgres.url(user=name)

    yield make
    with postgres.connect() as conn:
        for role in made:
            conn.execute(sql.SQL("drop owned by {}").format(role))
            conn.execute(sql.SQL("drop role {}").format(role))


def start(fleet: Fleet, count: int, url: str) -> None:
    fleet.start(count, url=url, environment=QUICK | {"DATABASE_URL": url})


@pytest.mark.parametrize(
    "settings",
    [
        {"statement_timeout": "300ms"},
        {"idle_session_timeout": "200ms"},  # less than an interval
        {
            "statement_timeout": "1s",
            "lock_timeout": "100ms",
            "idle_session_timeout": "400ms",
            "idle_in_transaction_session_timeout": "100ms",
            "transaction_timeout": "1s",
            "search_path": "nowhere",
            "default_transaction_isolation": "serializable",
            "synchronous_commit": "off",
        },
    ],
    ids=lambda settings: "everything" if len(settings) > 1 else next(iter(settings)),
)
def test_settings_of_the_role_do_not_reach_the_lease(
    fleet: Fleet, make_role: Make, figures: dict[str, list[float]], settings: dict[str, str]
) -> None:
    url = make_role(**settings)
    start(fleet, 1, url)
    (leader,) = fleet.replicas
    fleet.wait_for_leaders()
    start(fleet, 1, url)
    fleet.wait_for_log("lease.standby", fleet.replicas[1])
    # many times longer than any of these settings
    fleet.wait_for_heartbeats(4)
    assert [len(terms) for terms in fleet.report().terms.values()] == [1, 1, 1], leader.log
    assert "session.lost" not in fleet.logs()
    at = time.monotonic()
    leader.signal(signal.SIGTERM)
    for role, gap in fleet.succession(leader, at).items():
        figures[f"{role} handed over"].append(gap)
        assert gap < 1
    assert leader.process.wait(10) == 0
    assert fleet.stop() == [0, 0]
    fleet.assert_safe()


def test_a_read_only_role_leads_nothing_and_the_log_and_doctor_say_why(
    fleet: Fleet, make_role: Make, service: Service
) -> None:
    url = make_role(default_transaction_read_only="on")
    start(fleet, 1, url)
    fleet.wait_for_log("session.unreachable")
    assert "read-only" in fleet.logs()
    assert fleet.holders() == {}
    assert fleet.stop() == [0]
    done = service.call("doctor", url=url)
    assert done.returncode != 0
    assert "default_transaction_read_only" in done.stdout


def test_without_temp_and_without_a_look_at_other_sessions_a_role_leads_and_is_succeeded(
    fleet: Fleet, make_role: Make, figures: dict[str, list[float]]
) -> None:
    with fleet.postgres.connect() as conn:
        database = sql.Identifier(fleet.postgres.database)
        conn.execute(sql.SQL("revoke temporary on database {} from public").format(database))
        conn.execute("revoke all on schema public from public")
        conn.execute("grant usage on schema public to public")
    for trial in range(2):
        for url in (make_role(), make_role()):  # who may not see each other's last heartbeat
            start(fleet, 1, url)
            fleet.wait_for_leaders()
        leader, standby = fleet.replicas[-2:]
        fleet.wait_for_log("lease.standby", standby)
        assert leader.log.count("session.no_temp") == standby.log.count("session.no_temp") == 1
        at = time.monotonic()
        leader.signal(signal.SIGSTOP)  # the server ends its session after ttl; nobody saw since when it is silent
        for role, gap in fleet.succession(leader, at).items():
            figures[f"{role} taken over unseen"].append(gap)
            assert gap < (BOUND if role == "poller" else BOUND + HORIZON), (trial, role)
        fleet.stop()
        fleet.assert_safe()


def test_a_full_server_leaves_the_standby_alive_with_one_line_and_it_leads_when_there_is_room(
    directory: Path, service: Service
) -> None:
    server = Postgres(directory / f"full-{next(_serial)}", embedded_binaries())
    server.start("max_connections=12", "superuser_reserved_connections=2")
    server_url = server.url(user="replica")
    try:
        service.prepare(server)
        with server.connect() as conn:
            conn.execute("create role replica login superuser")  # grants are another test's
            conn.execute("alter role replica nosuperuser")
            conn.execute(GRANTS.format(role="replica"))
            conn.execute("create role filler login")
        with Fleet(service, server) as fleet:
            environment = QUICK | {"DATABASE_URL": server_url}
            (leader,) = fleet.start(1, url=server_url, roles=("scheduler",), environment=environment)
            fleet.wait_for_leader("scheduler")
            fillers = fill(server)
            (standby,) = fleet.start(1, url=server_url, roles=("scheduler",), environment=environment)
            wait_until(
                lambda: server.log.read_text().count("slots are reserved") > 4, 20, "it has tried again and again"
            )
            assert standby.process.poll() is None
            assert standby.log.count("session.unreachable") == 1, standby.log
            assert "slots are reserved" in standby.log
            assert len(fleet.report().terms["scheduler"]) == 1, "who leads needs no new connection"
            leader.signal(signal.SIGTERM)
            assert leader.process.wait(10) == 0
            # its slot is free
            assert fleet.wait_for_leader("scheduler", other_than=leader) is standby
            for filler in fillers:
                filler.close()
            assert fleet.stop() == [0, 0]
            fleet.assert_safe()
    finally:
        server.stop()


def fill(server: Postgres) -> list["psycopg.Connection[tuple[object, ...]]"]:
    """Connections until there is no room for more."""
    held: list[psycopg.Connection[tuple[object, ...]]] = []
    while True:
        try:
            held.append(psycopg.connect(server.url(user="filler")))
        except psycopg.OperationalError:
            return held
