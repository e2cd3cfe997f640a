"""What an operator is shown, for every state that a role can be in."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from {{cookiecutter.project_slug}}.config import ConfigError, Settings
from {{cookiecutter.project_slug}}.keys import LeaseKey
from {{cookiecutter.project_slug}}.lease.identity import application_name
from {{cookiecutter.project_slug}}.operate.database import Unreachable, database, place
from {{cookiecutter.project_slug}}.operate.doctor import Check, Result, examine
from {{cookiecutter.project_slug}}.operate.status import RoleStatus, State, duration, read_status, table

KEY = next(iter(LeaseKey))
LONG = "4711-0123abcd@" + "a-host-with-a-very-long-name." * 4

BEGIN_TERM = """
insert into {{cookiecutter.project_slug}}.lease (key, role, epoch, holder, pid, acquired_at)
values (%s, %s, %s, %s, %s, clock_timestamp() - interval '90 s')
on conflict (key) do update set epoch = excluded.epoch, holder = excluded.holder, pid = excluded.pid, released_at = null
"""
END_TERM = "update {{cookiecutter.project_slug}}.lease set released_at = now() where key = %s"
LOCK = "select pg_advisory_lock(%s)"

Replica = Callable[..., psycopg.Connection[Any]]


@pytest.fixture
def replica(database_url: str) -> Iterator[Replica]:
    """Opens a session as a replica has it; holding the lock and leading where asked."""
    opened: list[psycopg.Connection[Any]] = []

    def one(instance: str, *, locks: bool = False, leads: int = 0, **other: str) -> psycopg.Connection[Any]:
        options = {"application_name": application_name(instance), **other}
        opened.append(psycopg.connect(make_conninfo(database_url, **options), autocommit=True))
        if locks or leads:
            opened[-1].execute(LOCK, [KEY])
        if leads:
            opened[-1].execute(BEGIN_TERM, [KEY, KEY.role, leads, instance, opened[-1].info.backend_pid])
        return opened[-1]

    yield one
    for each in opened:
        each.close()


def look(conn: psycopg.Connection[Any]) -> RoleStatus:
    return read_status(conn)[0]


# -- status


def test_a_role_that_nobody_ever_led_is_free(conn: psycopg.Connection) -> None:
    roles = read_status(conn)
    assert [role.role for role in roles] == [key.role for key in LeaseKey]
    assert {(role.state, role.holder, role.epoch, role.last_end) for role in roles} == {(State.FREE, None, 0, None)}


@pytest.mark.parametrize("instance", ["4711-0123abcd@host", LONG])
def test_a_leader_is_shown_with_its_term_its_heartbeat_and_its_stand_bys(
    instance: str, conn: psycopg.Connection, replica: Replica
) -> None:
    leader = replica(instance, leads=7)
    replica("4712-0123abcd.1@host")
    replica("4713-0123abcd.0@host")  # this role is turned off there
    leader.execute("select 1")
    seen = look(conn)
    assert (seen.state, seen.holder, seen.holder_pid, seen.epoch) == (
        State.LEADING,
        instance,
        leader.info.backend_pid,
        7,
    )
    assert seen.leading_seconds == pytest.approx(90, abs=20)
    assert seen.heartbeat_age_seconds == pytest.approx(0, abs=20)
    assert seen.standbys == ["4712-0123abcd.1@host"]
    assert seen.last_end is None


def test_the_age_of_the_heartbeat_is_the_silence_of_the_session(conn: psycopg.Connection, replica: Replica) -> None:
    leader = replica("4711-0123abcd@host", leads=1)
    conn.execute("select pg_sleep(0.3)")
    before = look(conn).heartbeat_age_seconds
    leader.execute("select 1")
    after = look(conn).heartbeat_age_seconds
    assert before is not None
    assert after is not None
    assert before >= 0.3 > after


def test_a_holder_whose_term_has_not_begun_is_waiting(conn: psycopg.Connection, replica: Replica) -> None:
    former = replica("4711-0123abcd@host", leads=3)
    former.close()
    until_free(conn)
    replica("4712-0123abcd@host", locks=True)
    seen = look(conn)
    assert (seen.state, seen.holder, seen.last_end) == (State.WAITING, "4712-0123abcd@host", "unclean")
    assert seen.leading_since is None


def test_a_new_session_of_the_same_instance_is_waiting_until_its_term_begins(
    conn: psycopg.Connection, replica: Replica
) -> None:
    replica("4711-0123abcd@host", leads=3).close()
    until_free(conn)
    replica("4711-0123abcd@host", locks=True)
    assert look(conn).state is State.WAITING


@pytest.mark.parametrize(("clean", "last_end"), [(True, "clean"), (False, "unclean")])
def test_a_free_role_tells_how_its_last_term_ended(
    clean: bool, last_end: str, conn: psycopg.Connection, replica: Replica
) -> None:
    leader = replica("4711-0123abcd@host", leads=3)
    if clean:
        leader.execute(END_TERM, [KEY])
    leader.close()
    until_free(conn)
    assert (look(conn).state, look(conn).last_end) == (State.FREE, last_end)


@pytest.mark.parametrize("name", ["billing-of-somebody-else", ""])
def test_a_foreign_holder_is_a_collision(name: str, conn: psycopg.Connection, replica: Replica) -> None:
    foreign = replica("", locks=True, application_name=name)
    seen = look(conn)
    assert (seen.state, seen.holder_pid) == (State.COLLISION, foreign.info.backend_pid)
    assert seen.holder == (name or "a program without a name")
    assert f"holds its lock {KEY.value}" in table([seen])


def test_a_lock_of_the_same_number_in_another_database_or_key_space_is_none(
    conn: psycopg.Connection, empty_database_url: str, database_url: str
) -> None:
    with psycopg.connect(empty_database_url) as elsewhere, psycopg.connect(database_url) as here:
        elsewhere.execute(LOCK, [KEY])
        here.execute("select pg_advisory_lock(0, (%s - 4294967296)::int)", [max(KEY, 2**31)])
        here.execute(LOCK, [KEY + 2**32])
        assert look(conn).state is State.FREE


def test_a_role_without_privileges_sees_who_leads_and_no_times(
    conn: psycopg.Connection, database_url: str, replica: Replica
) -> None:
    leader = replica("4711-0123abcd@host", leads=7)
    name = f"nobody_{leader.info.backend_pid}"
    role = sql.Identifier(name)
    schema = sql.Identifier("{{cookiecutter.project_slug}}")
    conn.execute(sql.SQL("create role {} login").format(role))
    try:
        conn.execute(sql.SQL("grant usage on schema {} to {}").format(schema, role))
        conn.execute(sql.SQL("grant select on {}.lease to {}").format(schema, role))
        with psycopg.connect(make_conninfo(database_url, user=name), autocommit=True) as theirs:
            seen = look(theirs)
    finally:
        conn.execute(sql.SQL("drop owned by {}").format(role))
        conn.execute(sql.SQL("drop role {}").format(role))
    assert (seen.state, seen.holder, seen.epoch) == (State.LEADING, "4711-0123abcd@host", 7)
    assert seen.heartbeat_age_seconds is None


def test_the_table_fits_a_terminal_of_80_columns(
    conn: psycopg.Connection, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    replica(LONG, leads=2**32 + 1)
    replica(LONG + "b")
    lines = table(read_status(conn)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:2] == [KEY.role, "leading"]
    assert "4711-0123abcd" in lines[1]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.9, "0s"), (61, "1m01s"), (3600, "1h00m"), (90061, "1d01h")],
)
def test_a_duration_is_shown_in_two_units_at_most(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def until_free(conn: psycopg.Connection[Any]) -> None:
    """The server frees the locks of a closed connection a moment later; wait in the queue for that moment."""
    conn.execute(LOCK, [KEY])
    conn.execute("select pg_advisory_unlock(%s)", [KEY])


# -- doctor


def doctor(work: str, lease: str | None = None) -> dict[str, Check]:
    settings = Settings(database_url=SecretStr(work), lease_database_url=SecretStr(lease) if lease else None)
    return {check.name: check for check in examine(settings)}


def test_a_healthy_database_passes_every_check(database_url: str) -> None:
    checks = doctor(database_url)
    assert {name: check for name, check in checks.items() if check.result is Result.FAIL} == {}
    assert list(checks) == [
        "workers",
        "work database",
        "lease database",
        "server version",
        "read-write",
        "connection",
        "TEMP privilege",
        "time to live",
        "schema",
        "same database",
        "worker set-up",
        "lease keys",
        "leaders",
    ]
    assert checks["connection"].seen.startswith("direct")


def test_a_database_that_is_not_there_fails_without_the_password(database_url: str) -> None:
    checks = doctor("postgresql://u:hunter2@127.0.0.1:1/d", database_url)
    assert checks["work database"].result is Result.FAIL
    assert "127.0.0.1:1/d" in checks["work database"].hint
    assert checks["lease database"].result is Result.OK
    assert "hunter2" not in str(checks)


def test_an_empty_database_fails_with_the_command_to_type(empty_database_url: str) -> None:
    checks = doctor(empty_database_url)
    for name in ("schema", "lease keys"):
        assert checks[name].result is Result.FAIL
        assert "migrate" in checks[name].hint


def test_two_databases_are_not_taken_for_one(database_url: str, empty_database_url: str) -> None:
    assert doctor(empty_database_url, database_url)["same database"].result is Result.FAIL


def test_two_ways_to_one_database_are_seen_to_be_one(database_url: str) -> None:
    check = doctor(database_url, make_conninfo(database_url, options="-c work_mem=1MB"))["same database"]
    assert (check.result, check.seen) == (Result.OK, "both URLs lead to one database")


def test_a_database_that_is_read_only_by_default_fails(conn: psycopg.Connection, database_url: str) -> None:
    name = sql.Identifier(conn.info.dbname)
    conn.execute(sql.SQL("alter database {} set default_transaction_read_only = on").format(name))
    check = doctor(database_url)["read-write"]
    assert check.result is Result.FAIL
    assert "default_transaction_read_only" in check.hint


def test_a_key_that_another_program_uses_fails(database_url: str, replica: Replica) -> None:
    replica("", locks=True, application_name="billing-of-somebody-else")
    check = doctor(database_url)["lease keys"]
    assert check.result is Result.FAIL
    assert "billing-of-somebody-else" in check.seen


def leaders(url: str) -> Check:
    """What it says of the first role."""
    return next(check for check in examine(Settings(database_url=SecretStr(url))) if check.name == "leaders")


def test_it_says_who_leads_as_pg_locks_does(database_url: str, conn: psycopg.Connection, replica: Replica) -> None:
    leader = replica("4711-0123abcd.1@host", leads=7)
    replica("4712-0123abcd.1@host")
    check = leaders(database_url)
    assert check.result is Result.OK
    assert check.seen == f"{KEY.role}: led by 4711-0123abcd.1@host (pid {leader.info.backend_pid}, epoch 7)"
    leader.close()
    until_free(conn)
    check = leaders(database_url)
    assert (check.result, check.seen) == (Result.WARN, f"{KEY.role}: nobody leads, 1 compete")
    waits = replica("4713-0123abcd.1@host", locks=True)
    check = leaders(database_url)
    assert check.result is Result.WARN
    assert check.seen.startswith(f"{KEY.role}: 4713-0123abcd.1@host (pid {waits.info.backend_pid}) has the lock")


def test_a_newer_schema_is_no_failure(conn: psycopg.Connection, database_url: str) -> None:
    conn.execute("insert into {{cookiecutter.project_slug}}.migration (version, name) values (9999, 'next')")
    assert doctor(database_url)["schema"].result is Result.WARN


# -- connections


def test_an_unreachable_database_is_named_without_its_password() -> None:
    with (
        pytest.raises(Unreachable, match=r"127\.0\.0\.1:1/d") as caught,
        database("postgresql://u:hunter2@127.0.0.1:1/d"),
    ):
        pass
    assert "hunter2" not in str(caught.value)


def test_a_connection_that_breaks_is_unreachable_too(database_url: str, conn: psycopg.Connection) -> None:
    with pytest.raises(Unreachable), database(database_url) as victim:
        conn.execute("select pg_terminate_backend(%s)", [victim.info.backend_pid])
        victim.execute("select 1")


def test_what_the_database_refuses_is_a_matter_of_configuration(empty_database_url: str) -> None:
    with pytest.raises(ConfigError, match="migrate"), database(empty_database_url) as conn:
        read_status(conn)


def test_a_place_has_no_password() -> None:
    assert place("postgresql://u:hunter2@h/d") == "h:5432/d"
    assert place("host=/tmp user=u password=hunter2") == "/tmp:5432/u"
