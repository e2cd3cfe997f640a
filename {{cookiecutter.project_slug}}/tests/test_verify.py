"""`verify`: what it says is what the server says, and it leaves everything else alone."""

import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from {{cookiecutter.project_slug}}.config import ConfigError, Settings
from {{cookiecutter.project_slug}}.keys import VERIFY_KEYS, LeaseKey
from {{cookiecutter.project_slug}}.lease.identity import application_name
from {{cookiecutter.project_slug}}.lease.stability import Stability, Verdict
from {{cookiecutter.project_slug}}.operate import verify as module
from {{cookiecutter.project_slug}}.operate.database import Unreachable
from {{cookiecutter.project_slug}}.operate.doctor import Check, Result
from {{cookiecutter.project_slug}}.operate.verify import verify

KEY = next(iter(LeaseKey))
QUICK = {"interval_seconds": 0.2, "ttl_seconds": 1.5, "stop_grace_seconds": 0.5}
LOCKS = """
select objid::bigint, pid from pg_locks where locktype = 'advisory' and granted
   and database = (select oid from pg_database where datname = current_database())
"""
OCCUPY = """
insert into {{cookiecutter.project_slug}}.lease (key, role, acquired_at)
select key, 'verify', now() - %s from unnest(%s::bigint[]) as k (key)
"""
OTHERS = """
insert into {{cookiecutter.project_slug}}.lease (key, role, epoch, holder, acquired_at)
values (%s, %s, 7, 'x', now()), (%s, 'verify', 1, 'y', now())
"""
ROWS = "select * from {{cookiecutter.project_slug}}.lease where role <> 'verify' or holder = 'y' order by key"
IN_USE = "select count(*) from {{cookiecutter.project_slug}}.lease where acquired_at is not null"


def settings(url: str, **more: Any) -> Settings:
    return Settings(database_url=SecretStr(url), **{**QUICK, **more})


def until_no_lock(conn: psycopg.Connection) -> None:
    deadline = time.monotonic() + 10
    while conn.execute(LOCKS).fetchall():
        assert time.monotonic() < deadline, "a lock was left behind"


def test_the_promises_hold_and_what_it_says_is_what_pg_locks_says(database_url: str, conn: psycopg.Connection) -> None:
    said, held = {}, {}
    for check in verify(settings(database_url)):  # it waits while we look for ourselves
        assert check.result is Result.OK, check
        said[check.name], held[check.name] = check.seen, conn.execute(LOCKS).fetchall()
    until_no_lock(conn)
    assert list(said) == ["pooler rejection", "one leader", "clean failover"]
    assert "multiplexed" in said["pooler rejection"]
    [(key, leader)], [(same_key, successor)] = held["one leader"], held["clean failover"]
    assert key in VERIFY_KEYS
    assert (same_key, successor) != (key, leader)
    assert same_key == key
    assert said["one leader"].endswith(f"epoch 1, and pg_locks has one holder of key {key}, pid {leader}")
    assert said["clean failover"].endswith(f"epoch 2, and pg_locks has one holder of key {key}, pid {successor}")


def test_no_other_row_and_no_other_lock_is_touched(database_url: str, conn: psycopg.Connection) -> None:
    conn.execute(OTHERS, [KEY, KEY.role, VERIFY_KEYS[3]])
    before = conn.execute(ROWS).fetchall()
    with psycopg.connect(
        make_conninfo(database_url, application_name=application_name("4711-0123abcd@here")), autocommit=True
    ) as leader:
        leader.execute("select pg_advisory_lock(%s)", [KEY])
        assert all(check.result is Result.OK for check in verify(settings(database_url)))
        assert (int(KEY), leader.info.backend_pid) in conn.execute(LOCKS).fetchall()
    assert conn.execute(ROWS).fetchall() == before


@pytest.mark.slow
def test_a_key_serves_again_and_again_and_one_of_a_killed_run_after_a_while(
    database_url: str, conn: psycopg.Connection
) -> None:
    conn.execute(OCCUPY, [timedelta(0), list(VERIFY_KEYS[1:])])
    conn.execute(OCCUPY, [timedelta(hours=1), list(VERIFY_KEYS[:1])])
    for epoch in (2, 4):
        said = {check.name: check for check in verify(settings(database_url))}
        assert all(check.result is Result.OK for check in said.values())
        assert f"epoch {epoch}, and pg_locks has one holder of key {VERIFY_KEYS[0]}," in said["clean failover"].seen


def test_with_every_throwaway_key_in_use_it_says_so(database_url: str, conn: psycopg.Connection) -> None:
    conn.execute(OCCUPY, [timedelta(0), list(VERIFY_KEYS)])
    with pytest.raises(ConfigError, match="every throwaway key is in use"):
        list(verify(settings(database_url)))


def test_a_run_that_is_broken_off_leaves_nothing_behind(database_url: str, conn: psycopg.Connection) -> None:
    run = verify(settings(database_url))
    names = [next(run).name, next(run).name]
    assert names == ["pooler rejection", "one leader"]
    run.close()  # type: ignore[attr-defined]
    until_no_lock(conn)
    assert conn.execute(IN_USE).fetchone() == (0,)


def test_before_migrating_it_says_so(empty_database_url: str) -> None:
    with pytest.raises(ConfigError, match="migrate"):
        list(verify(settings(empty_database_url)))


def test_an_unreachable_database_is_named_without_its_password() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1/d") as caught:
        list(verify(settings("postgresql://u:hunter2@127.0.0.1:1/d")))
    assert "hunter2" not in str(caught.value)


def test_a_role_that_may_do_no_more_than_it_must_can_verify(conn: psycopg.Connection, database_url: str) -> None:
    name = f"least_{conn.info.backend_pid}"
    role, schema = sql.Identifier(name), sql.Identifier("{{cookiecutter.project_slug}}")
    conn.execute(sql.SQL("create role {} login").format(role))
    try:
        conn.execute(sql.SQL("grant usage on schema {} to {}").format(schema, role))
        conn.execute(sql.SQL("grant select on all tables in schema {} to {}").format(schema, role))
        conn.execute(sql.SQL("grant insert, update on {}.lease to {}").format(schema, role))
        checks = list(verify(settings(make_conninfo(database_url, user=name))))
        until_no_lock(conn)
    finally:
        conn.execute(sql.SQL("drop owned by {}").format(role))
        conn.execute(sql.SQL("drop role {}").format(role))
    assert [check.result for check in checks] == [Result.OK] * 3, checks


# -- it fails when a promise does not hold


def failed(url: str) -> Check:
    (check,) = [check for check in verify(settings(url)) if check.result is Result.FAIL]
    return check


def test_two_workers_at_once_are_a_failure(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works = module._Trial.works

    def twice(trial: Any, replica: Any, term: Any) -> None:
        works(trial, replica, term)
        trial._most_at_once = 2

    monkeypatch.setattr(module._Trial, "works", twice)
    names = {check.name: check for check in verify(settings(database_url)) if check.result is Result.FAIL}
    assert "2 replicas worked at once" in names["one leader"].seen


def test_a_second_holder_is_a_failure(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = module._Trial._look

    def wrong(trial: Any) -> Any:
        return look(trial)._replace(holders=[1, 2])

    monkeypatch.setattr(module._Trial, "_look", wrong)
    names = {check.name for check in verify(settings(database_url)) if check.result is Result.FAIL}
    assert names == {"one leader", "clean failover"}


def test_a_probe_that_trusts_any_pooler_is_a_failure(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = Verdict(Stability.SESSION_POOLED, "looks fine")
    monkeypatch.setattr(module, "classify", lambda conn, connect: trusted)
    assert failed(database_url).name == "pooler rejection"
