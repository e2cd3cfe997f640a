import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql

from {{cookiecutter.project_slug}} import Lease, LeaseLost, Worker
from {{cookiecutter.project_slug}}.task import enqueue
from {{cookiecutter.project_slug}}_poller import poller, worker
from {{cookiecutter.project_slug}}_poller.poller import Payload, handler

MakeLease = Callable[[str, str], Lease]
Leading = Callable[[Worker, Lease], AbstractContextManager[None]]

TASKS = "select kind, state, attempts from {{cookiecutter.project_slug}}.task order by id"
ERRORS = "select state, error, run_at > now() from {{cookiecutter.project_slug}}.task order by id"
MAKE_DUE = "update {{cookiecutter.project_slug}}.task set run_at = now()"
FILL = """
insert into {{cookiecutter.project_slug}}.task (kind, state, run_at, finished_at)
select 'add', state, now() - n * interval '1 s', now() from generate_series(1, 20000) as n,
    (values ('done'), ('waiting')) as states (state)
"""
WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
ALIVE = "select count(*) from pg_stat_activity where pid = %s"
TERMINATE = "select pg_terminate_backend(pg_backend_pid())"
IDLE_TOO_LONG = "set local idle_in_transaction_session_timeout = '50ms'"


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch, conn: psycopg.Connection) -> None:
    """One handler only: `add` writes a row and then, if told so, raises."""
    conn.execute("create table effect (name text)")
    monkeypatch.setattr(poller, "HANDLERS", {})

    @handler("add", max_attempts=2)
    def add(conn: psycopg.Connection, payload: Payload) -> None:
        conn.execute("insert into effect values (%s)", [payload.get("name")])
        if "error" in payload:
            raise RuntimeError(payload["error"])


@pytest.fixture
def lease(make_lease: MakeLease, database_url: str) -> Lease:
    return make_lease("poller", database_url)


def effects(conn: psycopg.Connection) -> list[str]:
    return [name for (name,) in conn.execute("select name from effect")]


def test_due_tasks_are_run_once_in_order(conn: psycopg.Connection, lease: Lease) -> None:
    later = datetime.now().astimezone() + timedelta(hours=1)
    enqueue(conn, "add", {"name": "later"}, run_at=later)
    enqueue(conn, "add", {"name": "second"}, run_at=later - timedelta(hours=2))
    enqueue(conn, "add", {"name": "first"}, run_at=later - timedelta(hours=3))
    assert poller.work(lease) == 2
    assert poller.work(lease) == 0
    assert effects(conn) == ["first", "second"]
    assert conn.execute(TASKS).fetchall() == [("add", "waiting", 0), ("add", "done", 1), ("add", "done", 1)]


def test_a_task_that_fails_takes_no_other_down_is_retried_later_and_dies_with_its_error(
    conn: psycopg.Connection, lease: Lease
) -> None:
    enqueue(conn, "add", {"name": "bad", "error": "no paper"})
    enqueue(conn, "add", {"name": "good"})
    poller.work(lease)
    assert effects(conn) == ["good"]
    assert conn.execute(ERRORS).fetchall() == [
        ("waiting", "RuntimeError: no paper", True),
        ("done", None, False),
    ]
    conn.execute(MAKE_DUE)
    poller.work(lease)
    assert conn.execute(TASKS).fetchall() == [("add", "dead", 2), ("add", "done", 1)]
    assert poller.work(lease) == 0


def test_retries_come_twice_as_late_each_time_up_to_a_limit_and_not_all_at_once() -> None:
    seconds = [[poller._delay(attempts).total_seconds() for _ in range(200)] for attempts in (1, 2, 3, 64)]
    for delays, middle in zip(seconds, (1, 2, 4, 3600), strict=True):
        assert middle * 0.5 <= min(delays) < middle * 0.75
        assert middle * 1.25 < max(delays) <= middle * 1.5


def test_a_task_of_unknown_kind_is_kept_until_a_release_knows_it(
    conn: psycopg.Connection, lease: Lease, leading: Leading
) -> None:
    enqueue(conn, "from_the_next_release", {})
    poller.work(lease)
    assert conn.execute(TASKS).fetchall() == [("from_the_next_release", "unhandled", 0)]
    assert poller.work(lease) == 0

    handled = threading.Event()
    handler("from_the_next_release")(lambda conn, payload: handled.set())
    with leading(worker, lease):
        assert handled.wait(10)
    assert conn.execute(TASKS).fetchall() == [("from_the_next_release", "done", 1)]


def test_a_backlog_is_worked_off_without_a_pause(
    conn: psycopg.Connection, lease: Lease, leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "POLL_SECONDS", 3600)
    handled = threading.Semaphore(0)
    handler("count")(lambda conn, payload: handled.release())
    for _ in range(2 * poller.BATCH + 1):
        enqueue(conn, "count", {})
    with leading(worker, lease):
        for _ in range(2 * poller.BATCH + 1):
            assert handled.acquire(timeout=10)
    assert poller.work(lease) == 0


def test_when_asked_to_stop_it_commits_what_is_done_and_puts_the_rest_back(
    conn: psycopg.Connection, lease: Lease
) -> None:
    handler("stop")(lambda conn, payload: lease._term.stop("asked to"))
    for kind in ("add", "stop", "add", "unknown"):
        enqueue(conn, kind, {"name": "done"})
    poller.work(lease)
    assert effects(conn) == ["done"]
    assert conn.execute(TASKS).fetchall() == [
        ("add", "done", 1),
        ("stop", "done", 1),
        ("add", "waiting", 0),
        ("unknown", "unhandled", 0),
    ]


def test_a_leader_that_lost_its_lease_leaves_no_effect_and_no_task_undone(
    conn: psycopg.Connection, lease: Lease, make_lease: MakeLease, database_url: str
) -> None:
    enqueue(conn, "add", {"name": "once"})
    successor = make_lease("poller", database_url)
    with pytest.raises(LeaseLost):
        poller.work(lease)
    assert effects(conn) == []
    poller.work(successor)
    assert effects(conn) == ["once"]


@pytest.mark.parametrize("end", [TERMINATE, IDLE_TOO_LONG])
def test_a_task_that_ends_its_session_does_not_end_every_batch_in_the_same_way(
    conn: psycopg.Connection, lease: Lease, end: LiteralString
) -> None:
    @handler("fatal", max_attempts=1)
    def fatal(mine: psycopg.Connection, payload: Payload) -> None:
        mine.execute(end)
        while conn.execute(ALIVE, [mine.info.backend_pid]).fetchone() == (1,):
            pass
        mine.execute("select 1")

    enqueue(conn, "fatal", {})
    enqueue(conn, "add", {"name": "survivor"})
    poller.work(lease)
    assert conn.execute(TASKS).fetchall() == [("fatal", "dead", 1), ("add", "waiting", 0)]
    poller.work(lease)
    assert effects(conn) == ["survivor"]


def test_a_second_handler_for_a_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'add' have two handlers"):
        handler("add")


def test_taking_a_batch_reads_neither_the_done_nor_the_waiting_tasks_as_a_whole(conn: psycopg.Connection) -> None:
    conn.execute(FILL)
    conn.execute("analyze {{cookiecutter.project_slug}}.task")
    parameters = {"batch": poller.BATCH, "kinds": ["add"], "epoch": 1}
    plan = "\n".join(line for (line,) in conn.execute(sql.SQL("explain ") + sql.SQL(poller.TAKE), parameters))
    assert "task_due" in plan
    assert "Seq Scan" not in plan


def test_a_task_exists_if_and_when_its_transaction_commits(conn: psycopg.Connection, lease: Lease) -> None:
    with conn.transaction(force_rollback=True):
        assert enqueue(conn, "add", {})
    assert poller.work(lease) == 0


def test_of_the_live_tasks_of_a_kind_one_has_a_key(conn: psycopg.Connection, lease: Lease) -> None:
    assert enqueue(conn, "add", {"name": "a"}, key="1")
    assert enqueue(conn, "add", {"name": "b"}, key="1") is None
    assert enqueue(conn, "add", {"name": "c"}, key="2")
    assert enqueue(conn, "another", {"name": "d"}, key="1")
    poller.work(lease)
    assert enqueue(conn, "add", {"name": "e"}, key="1")
    assert enqueue(conn, "another", {"name": "f"}, key="1") is None
    poller.work(lease)
    assert effects(conn) == ["a", "c", "e"]


def test_a_key_enqueued_while_its_task_runs_is_not_lost(
    conn: psycopg.Connection, lease: Lease, database_url: str
) -> None:
    def enqueue_again() -> int | None:
        with psycopg.connect(database_url) as other:
            return enqueue(other, "look", {}, key="1")

    with ThreadPoolExecutor(1) as thread:

        @handler("look")
        def look(_: psycopg.Connection, payload: Payload) -> None:
            again.append(thread.submit(enqueue_again))
            while conn.execute(WAITING).fetchone() != (1,):
                assert not again[-1].done()

        again: list[Future[int | None]] = []
        enqueue(conn, "look", {}, key="1")
        poller.work(lease)
        assert again[0].result(timeout=10) is not None


def test_a_time_without_a_zone_is_refused(conn: psycopg.Connection) -> None:
    with pytest.raises(ValueError, match="run_at of a task needs a time zone"):
        enqueue(conn, "add", {}, run_at=datetime(2030, 1, 1))
