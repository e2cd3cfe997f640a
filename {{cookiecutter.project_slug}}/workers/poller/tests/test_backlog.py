"""What is known of the queue without a leader: how long it is, and what a dead leader left in it."""

from collections.abc import Callable
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from {{cookiecutter.project_slug}} import Lease, task
from {{cookiecutter.project_slug}}.task import Backlog, backlog, enqueue, requeue

MakeLease = Callable[[str, str], Lease]

SET_STATE = """
update {{cookiecutter.project_slug}}.task
set state = %s, epoch = %s, finished_at = case when %s in ('done', 'dead') then now() end where kind = %s
"""
AGE = "update {{cookiecutter.project_slug}}.task set run_at = now() + %s where kind = %s"
STATES = "select kind, state from {{cookiecutter.project_slug}}.task order by id"
UNLOCK = "select pg_advisory_unlock(key) from {{cookiecutter.project_slug}}.lease where role = 'poller'"
LOCK = "select pg_advisory_lock(key) from {{cookiecutter.project_slug}}.lease where role = 'poller'"
FILL = """
insert into {{cookiecutter.project_slug}}.task (kind, state, run_at, finished_at)
select 'add', state, now() - n * interval '1 s', case when state in ('done', 'dead') then now() end
from generate_series(1, 20000) as n, (values ('done'), ('waiting'), ('dead')) as states (state)
"""


def put(conn: psycopg.Connection, kind: str, state: str, epoch: int | None = None) -> None:
    enqueue(conn, kind, {})
    conn.execute(SET_STATE, [state, epoch, state, kind])


def test_an_empty_queue_has_no_backlog(conn: psycopg.Connection) -> None:
    assert backlog(conn) == Backlog(0, 0, 0, timedelta(0))


def test_the_backlog_is_what_is_due_what_runs_and_what_is_dead(conn: psycopg.Connection) -> None:
    states = ("waiting", "retry", "abandoned", "running", "done", "dead")
    for state in states:
        put(conn, state, state)
    put(conn, "later", "waiting")
    for kind, age in (("waiting", "-1 min"), ("retry", "-1 hour"), ("later", "1 hour"), ("dead", "-1 day")):
        conn.execute(AGE, [age, kind])
    found = backlog(conn)
    assert (found.waiting, found.running, found.dead) == (2, 2, 1)
    assert timedelta(hours=1) <= found.oldest < timedelta(hours=1, minutes=1)


def test_counting_ends_at_a_limit_and_goes_by_indexes(
    conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute(FILL)
    conn.execute("analyze {{cookiecutter.project_slug}}.task")
    monkeypatch.setattr(task, "COUNT_LIMIT", 50)
    found = backlog(conn)
    assert (found.waiting, found.dead) == (50, 50)
    explain = sql.SQL("explain ") + sql.SQL(task.BACKLOG)
    assert "Seq Scan" not in "\n".join(line for (line,) in conn.execute(explain, {"limit": 50}))


def test_tasks_are_put_back_once_their_leader_has_a_successor_or_nobody_leads(
    conn: psycopg.Connection, make_lease: MakeLease, database_url: str
) -> None:
    epoch = make_lease("poller", database_url).epoch
    put(conn, "ours", "running", epoch)
    put(conn, "old", "running", epoch - 1)
    put(conn, "done", "done", epoch - 1)
    with psycopg.connect(database_url, autocommit=True) as leader:
        leader.execute(LOCK)
        assert requeue(conn) == 1
        assert conn.execute(STATES).fetchall() == [("ours", "running"), ("old", "abandoned"), ("done", "done")]
        leader.execute(UNLOCK)  # the end of a session takes effect a moment after it
    assert requeue(conn) == 1
    assert conn.execute(STATES).fetchall() == [("ours", "abandoned"), ("old", "abandoned"), ("done", "done")]
    assert requeue(conn) == 0
