"""The poller on a real PostgreSQL: its batches called by hand, its loop as a replica runs it."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from {{cookiecutter.project_slug}} import Lease, LeaseLost, Worker
from {{cookiecutter.project_slug}}.task import enqueue, enqueue_async
from {{cookiecutter.project_slug}}_poller import batch, poller, queue, registry
from {{cookiecutter.project_slug}}_poller.registry import Task, effects, handler

MakeLease = Callable[[str, str], Lease]
Leading = Callable[[Worker, Lease], AbstractContextManager[None]]

WORKER = Worker(poller.run)
TASKS = "select kind, state, attempts from {{cookiecutter.project_slug}}.task order by id"
ERRORS = "select state, error, run_at > now() from {{cookiecutter.project_slug}}.task order by id"
MAKE_DUE = "update {{cookiecutter.project_slug}}.task set run_at = now() where finished_at is null"
DUE_LATER = "update {{cookiecutter.project_slug}}.task set run_at = now() + interval '1 h'"
LEAVE = "update {{cookiecutter.project_slug}}.task set state = %s, epoch = 0, attempts = %s"
FILL = """
insert into {{cookiecutter.project_slug}}.task (kind, key, state, run_at, finished_at)
select 'add', n::text, state, now() - n * interval '1 s', case when state in ('done', 'dead') then now() end
from generate_series(1, 20000) as n, (values ('done'), ('waiting'), ('dead')) as states (state)
"""
WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
ALIVE = "select count(*) from pg_stat_activity where pid = %s"
TERMINATE = "select pg_terminate_backend(pg_backend_pid())"
IDLE_TOO_LONG = "set local idle_in_transaction_session_timeout = '50ms'"
LISTENERS = """
select count(*) from pg_stat_activity
where datname = current_database() and application_name = '{{cookiecutter.project_slug}}.listen'
"""


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch, conn: psycopg.Connection) -> None:
    """One handler only: `add` writes a row and then, if told so, raises."""
    conn.execute("create table effect (name text)")
    monkeypatch.setattr(registry, "HANDLERS", {})
    for module in (queue, batch, poller):
        monkeypatch.setattr(module, "HANDLERS", registry.HANDLERS)

    @handler("add", max_attempts=2)
    def add(conn: psycopg.Connection[Any], task: Task) -> None:
        conn.execute("insert into effect values (%s)", [task.payload.get("name")])
        if "error" in task.payload:
            raise RuntimeError(task.payload["error"])


@pytest.fixture
def lease(make_lease: MakeLease, database_url: str) -> Lease:
    return make_lease("poller", database_url)


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks by itself once an hour only, so that what comes at once was woken."""
    monkeypatch.setattr(poller, "POLL_SECONDS", 3600)


def effects_of(conn: psycopg.Connection) -> list[str]:
    return [name for (name,) in conn.execute("select name from effect")]


def tasks(conn: psycopg.Connection) -> list[tuple[Any, ...]]:
    return conn.execute(TASKS).fetchall()


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def work(lease: Lease) -> bool:
    return batch.run_batches(lease, list(registry.HANDLERS))


# -- batches: transactional tasks


def test_due_tasks_are_run_once_in_order(conn: psycopg.Connection, lease: Lease) -> None:
    later = datetime.now().astimezone() + timedelta(hours=1)
    enqueue(conn, "add", {"name": "later"}, run_at=later)
    enqueue(conn, "add", {"name": "second"}, run_at=later - timedelta(hours=2))
    enqueue(conn, "add", {"name": "first"}, run_at=later - timedelta(hours=3))
    assert work(lease)
    assert not work(lease)
    assert effects_of(conn) == ["first", "second"]
    assert tasks(conn) == [("add", "waiting", 0), ("add", "done", 1), ("add", "done", 1)]


@pytest.mark.parametrize("bad", [0, 3, 6])
def test_a_task_that_fails_takes_no_other_down_is_retried_later_and_dies_with_its_error(
    conn: psycopg.Connection, lease: Lease, bad: int
) -> None:
    for number in range(7):
        error = {"error": "no \0 paper"[: 3 + 8 * (number % 2)].replace("\0", "")} if number == bad else {}
        enqueue(conn, "add", {"name": str(number), **error})
    work(lease)
    good = [str(number) for number in range(7) if number != bad]
    assert effects_of(conn) == good
    state, error, later = conn.execute(ERRORS).fetchall()[bad]
    assert (state, error.startswith("RuntimeError: no"), later) == ("retry", True, True)
    assert not work(lease)
    conn.execute(MAKE_DUE)
    work(lease)
    assert tasks(conn)[bad] == ("add", "dead", 2)
    assert effects_of(conn) == good
    assert not work(lease)


def test_a_handler_that_goes_on_after_an_error_of_the_database_is_the_one_to_blame(
    conn: psycopg.Connection, lease: Lease
) -> None:
    @handler("careless")
    def careless(mine: psycopg.Connection[Any], task: Task) -> None:
        try:
            mine.execute("select 1 / %s", [task.payload["by"]])
        except psycopg.errors.DivisionByZero:
            return

    for by in (1, 0, 2):
        enqueue(conn, "careless", {"by": by})
    work(lease)
    assert [state for _, state, _ in tasks(conn)] == ["done", "retry", "done"]


@pytest.mark.parametrize("end", [TERMINATE, IDLE_TOO_LONG])
def test_a_task_that_ends_its_session_is_found_among_those_of_its_batch(
    conn: psycopg.Connection, lease: Lease, end: LiteralString
) -> None:
    @handler("fatal", max_attempts=1)
    def fatal(mine: psycopg.Connection[Any], task: Task) -> None:
        mine.execute("insert into effect values (%s)", [str(task.id)])
        if task.payload.get("fatal"):
            mine.execute(end)
            wait_until(lambda: conn.execute(ALIVE, [mine.info.backend_pid]).fetchone() == (0,))

    for number in range(5):
        enqueue(conn, "fatal", {"fatal": number == 2})
    work(lease)
    assert [state for _, state, _ in tasks(conn)] == ["done", "done", "dead", "done", "done"]
    assert len(effects_of(conn)) == 4


def test_without_a_database_no_task_is_to_blame(conn: psycopg.Connection, lease: Lease) -> None:
    enqueue(conn, "add", {"name": "x"})
    taken = queue.take(lease, "add", 1, charge=False)
    lease._pool.close()
    with pytest.raises(psycopg.OperationalError):
        batch.attempt(lease, taken)
    assert tasks(conn) == [("add", "running", 0)]


def test_retries_come_twice_as_late_each_time_up_to_a_limit_and_not_all_at_once() -> None:
    seconds = [[queue.back_off(attempts).total_seconds() for _ in range(200)] for attempts in (1, 2, 3, 64)]
    for delays, middle in zip(seconds, (1, 2, 4, 3600), strict=True):
        assert middle * 0.5 <= min(delays) < middle * 0.75
        assert middle * 1.25 < max(delays) <= middle * 1.5


def test_when_asked_to_stop_it_commits_what_is_done_and_puts_the_rest_back(
    conn: psycopg.Connection, lease: Lease
) -> None:
    @handler("stop")
    def stop(mine: psycopg.Connection[Any], task: Task) -> None:
        if task.payload:
            lease._term.stop("asked to")

    for payload in ({}, {"now": 1}, {}):
        enqueue(conn, "stop", payload)
    work(lease)
    assert tasks(conn) == [("stop", "done", 1), ("stop", "done", 1), ("stop", "retry", 0)]


@pytest.mark.slow
def test_a_leader_that_lost_its_lease_leaves_no_effect_and_no_task_undone(
    conn: psycopg.Connection, lease: Lease, make_lease: MakeLease, database_url: str, leading: Leading
) -> None:
    enqueue(conn, "add", {"name": "once"})
    taken = queue.take(lease, "add", 1, charge=False)
    successor = make_lease("poller", database_url)
    with pytest.raises(LeaseLost):
        batch.attempt(lease, taken)
    assert effects_of(conn) == []
    with leading(WORKER, successor):
        wait_until(lambda: effects_of(conn))
    assert effects_of(conn) == ["once"]


def test_a_task_changed_by_hand_while_it_ran_keeps_no_effect(conn: psycopg.Connection, lease: Lease) -> None:
    enqueue(conn, "add", {"name": "x"})
    taken = queue.take(lease, "add", 1, charge=False)
    conn.execute("delete from {{cookiecutter.project_slug}}.task")
    batch.attempt(lease, taken)
    assert effects_of(conn) == []


def test_no_statement_reads_the_table_as_a_whole(conn: psycopg.Connection) -> None:
    conn.execute(FILL)
    conn.execute("analyze {{cookiecutter.project_slug}}.task")
    parameters: dict[str, Any] = {"kind": "add", "kinds": ["add"], "limit": batch.BATCH, "charge": 0, "epoch": 1}
    parameters |= {"id": 7, "attempt": 1, "ids": list(range(500)), "attempts": [1] * 500, "error": "x"}
    parameters["delay"] = timedelta(1)
    for name in ("TAKE", "TAKE_ABANDONED", "FINISH", "PUT_BACK", "RETRY", "BURY", "LOOK"):
        explain = sql.SQL("explain ") + sql.SQL(getattr(queue, name))
        plan = "\n".join(line for (line,) in conn.execute(explain, parameters))
        assert "Seq Scan" not in plan, name
        assert "Index" in plan, name


# -- the loop


def test_a_task_wakes_the_poller_at_once(
    conn: psycopg.Connection, lease: Lease, leading: Leading, seldom: None
) -> None:
    with leading(WORKER, lease):
        wait_until(lambda: conn.execute(LISTENERS).fetchone() == (1,))
        enqueue(conn, "add", {"name": "now"})
        wait_until(lambda: effects_of(conn) == ["now"])


@pytest.mark.slow
def test_without_a_listening_session_it_looks_by_itself(
    conn: psycopg.Connection, lease: Lease, leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease._pool, "lease_url", "postgresql://nobody@127.0.0.1:1/nothing")
    with leading(WORKER, lease):
        enqueue(conn, "add", {"name": "first"})
        wait_until(lambda: effects_of(conn) == ["first"])
        enqueue(conn, "add", {"name": "second"})
        wait_until(lambda: effects_of(conn) == ["first", "second"])


def test_a_listening_session_that_ends_is_replaced(
    conn: psycopg.Connection, lease: Lease, leading: Leading, seldom: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("{{cookiecutter.project_slug}}.worker.LISTEN_RETRY_SECONDS", 0.05)
    with leading(WORKER, lease):
        for name in ("one", "two"):
            wait_until(lambda: conn.execute(LISTENERS).fetchone() == (1,))
            enqueue(conn, "add", {"name": name})
            wait_until(lambda name=name: name in effects_of(conn))  # type: ignore[misc]
            conn.execute(LISTENERS.replace("count(*)", "pg_terminate_backend(pid)"))


def test_a_planned_task_runs_when_it_is_due_and_not_before(
    conn: psycopg.Connection, lease: Lease, leading: Leading, seldom: None
) -> None:
    @handler("plan")
    def plan(mine: psycopg.Connection[Any], task: Task) -> None:
        mine.execute("insert into effect select clock_timestamp() - run_at from {{cookiecutter.project_slug}}.task")

    row = conn.execute("select clock_timestamp() + interval '0.7 s'").fetchone()
    assert row is not None
    enqueue(conn, "plan", {}, run_at=row[0])
    with leading(WORKER, lease):
        wait_until(lambda: effects_of(conn))
    (late,) = conn.execute("select name::interval from effect").fetchone() or (None,)
    assert timedelta(0) <= late < timedelta(seconds=5)


def test_a_backlog_of_several_kinds_is_worked_off_without_a_pause(
    conn: psycopg.Connection, lease: Lease, leading: Leading, seldom: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "BATCH", 10)
    handled = threading.Semaphore(0)
    for kind in ("one", "two"):
        handler(kind)(lambda conn, task: handled.release())
        for _ in range(25):
            enqueue(conn, kind, {})
    with leading(WORKER, lease):
        for _ in range(50):
            assert handled.acquire(timeout=20)
    assert {state for _, state, _ in tasks(conn)} == {"done"}


def test_a_task_of_unknown_kind_is_kept_until_a_release_knows_it(
    conn: psycopg.Connection, make_lease: MakeLease, database_url: str, leading: Leading
) -> None:
    enqueue(conn, "from_the_next_release", {})
    enqueue(conn, "add", {"name": "known"})
    with leading(WORKER, make_lease("poller", database_url)):
        wait_until(lambda: effects_of(conn))
    assert tasks(conn)[0] == ("from_the_next_release", "waiting", 0)

    handled = threading.Event()
    handler("from_the_next_release")(lambda conn, task: handled.set())
    with leading(WORKER, make_lease("poller", database_url)):
        assert handled.wait(20)
    assert tasks(conn)[0] == ("from_the_next_release", "done", 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tasks_with_outside_effects_run_side_by_side_up_to_their_concurrency(
    conn: psycopg.Connection, lease: Lease, leading: Leading, asynchronous: bool
) -> None:
    together = threading.Barrier(3)
    seen: list[tuple[int, int, int]] = []

    def outside(lease: Lease, task: Task) -> None:
        together.wait(20)  # breaks unless three run at once
        seen.append((task.id, task.attempt, lease.epoch))

    async def outside_async(lease: Lease, task: Task) -> None:
        await asyncio.to_thread(outside, lease, task)

    handler("outside", concurrency=3, transactional=False)(outside_async if asynchronous else outside)
    for _ in range(6):
        enqueue(conn, "outside", {})
    with leading(WORKER, lease):
        wait_until(lambda: [state for _, state, _ in tasks(conn)] == ["done"] * 6)
    assert sorted(seen) == [(number, 1, lease.epoch) for number in range(1, 7)]


def test_an_async_handler_may_have_its_transaction_too(
    conn: psycopg.Connection, lease: Lease, leading: Leading
) -> None:
    @handler("book", max_attempts=1)
    async def book(mine: psycopg.AsyncConnection[Any], task: Task) -> None:
        await mine.execute("insert into effect values (%s)", [task.payload["name"]])
        await enqueue_async(mine, "add", {"name": f"after {task.payload['name']}"})
        if task.payload["name"] == "bad":
            raise RuntimeError("no")

    for name in ("good", "bad"):
        enqueue(conn, "book", {"name": name})
    with leading(WORKER, lease):
        wait_until(lambda: [state for _, state, _ in tasks(conn)].count("waiting") == 0 and len(effects_of(conn)) == 2)
        wait_until(lambda: tasks(conn)[1][1] == "dead")
    assert effects_of(conn) == ["good", "after good"]


@pytest.mark.slow
@pytest.mark.parametrize("raises", [RuntimeError("no"), asyncio.CancelledError()])
def test_an_outside_task_that_fails_is_retried_and_dies(
    conn: psycopg.Connection, lease: Lease, leading: Leading, raises: BaseException, seldom: None
) -> None:
    @handler("mail", max_attempts=2, transactional=False)
    async def mail(lease: Lease, task: Task) -> None:
        raise raises

    enqueue(conn, "mail", {})
    with leading(WORKER, lease):
        wait_until(lambda: tasks(conn) == [("mail", "retry", 1)])
        wait_until(lambda: tasks(conn) == [("mail", "dead", 2)])  # about a second later, unasked


@pytest.mark.parametrize("asynchronous", [False, True])
def test_when_asked_to_stop_an_outside_task_that_has_begun_goes_on_to_its_end(
    conn: psycopg.Connection, lease: Lease, leading: Leading, asynchronous: bool
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(lease: Lease, task: Task) -> None:
        begun.set()
        assert may_end.wait(20)

    async def slow_async(lease: Lease, task: Task) -> None:
        await asyncio.to_thread(slow, lease, task)

    handler("slow", concurrency=1, transactional=False)(slow_async if asynchronous else slow)
    for _ in range(2):
        enqueue(conn, "slow", {})
    with leading(WORKER, lease):
        assert begun.wait(20)
        enqueue(conn, "slow", {})  # wakes the loop, which may see the request to stop before it is cancelled
        lease._term.stop("asked to")
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert tasks(conn)[0] == ("slow", "running", 1)
        may_end.set()
    assert tasks(conn) == [("slow", "done", 1), ("slow", "waiting", 0), ("slow", "waiting", 0)]


def test_an_async_task_is_cancelled_when_the_lease_is_lost(
    conn: psycopg.Connection, lease: Lease, leading: Leading
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    @handler("slow", transactional=False)
    async def slow(lease: Lease, task: Task) -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    enqueue(conn, "slow", {})
    with leading(WORKER, lease):
        assert begun.wait(20)
        lease._term.lose("taken away")
        assert cancelled.wait(20)
    assert tasks(conn) == [("slow", "running", 1)]


def test_an_error_of_the_database_ends_the_term(conn: psycopg.Connection, lease: Lease, leading: Leading) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable), leading(WORKER, lease):
        wait_until(lambda: conn.execute(LISTENERS).fetchone() == (1,))
        conn.execute("alter table {{cookiecutter.project_slug}}.task rename to gone")
        wait_until(lambda: conn.execute(LISTENERS).fetchone() == (0,))


# -- what a dead leader left


@pytest.mark.slow
def test_tasks_of_a_dead_leader_come_back_and_each_attempt_alone_is_counted(
    conn: psycopg.Connection, make_lease: MakeLease, database_url: str, leading: Leading
) -> None:
    for name in ("one", "two", "three"):
        enqueue(conn, "add", {"name": name})
    queue.take(make_lease("poller", database_url), "add", 10, charge=False)
    assert tasks(conn) == [("add", "running", 0)] * 3
    successor = make_lease("poller", database_url)
    with leading(WORKER, successor):
        wait_until(lambda: tasks(conn) == [("add", "done", 1)] * 3)
    assert sorted(effects_of(conn)) == ["one", "three", "two"]


def test_of_those_left_behind_one_runs_at_a_time(
    conn: psycopg.Connection, lease: Lease, leading: Leading, seldom: None
) -> None:
    lock, seen = threading.Lock(), []

    @handler("suspect", transactional=False)
    def suspect(lease: Lease, task: Task) -> None:
        assert lock.acquire(blocking=False)
        time.sleep(0.02)
        seen.append(task.attempt)
        lock.release()

    for _ in range(5):
        enqueue(conn, "suspect", {})
    conn.execute(LEAVE, ["abandoned", 1])
    with leading(WORKER, lease):
        wait_until(lambda: [state for _, state, _ in tasks(conn)] == ["done"] * 5)
    assert seen == [2] * 5


@pytest.mark.parametrize("transactional", [True, False])
def test_a_task_whose_attempts_have_all_ended_with_the_process_is_dead_unrun(
    conn: psycopg.Connection, lease: Lease, leading: Leading, transactional: bool
) -> None:
    run: list[Task] = []
    if transactional:
        handler("deadly", max_attempts=3)(lambda conn, task: run.append(task))
    else:
        handler("deadly", max_attempts=3, transactional=False)(lambda lease, task: run.append(task))
    enqueue(conn, "deadly", {})
    conn.execute(LEAVE, ["abandoned", 3])
    with leading(WORKER, lease):
        wait_until(lambda: tasks(conn) == [("deadly", "dead", 3)])
    assert run == []
    assert conn.execute(ERRORS).fetchone()[1] == queue.LEFT  # type: ignore[index]


# -- putting tasks in


def test_a_task_exists_if_and_when_its_transaction_commits(conn: psycopg.Connection, lease: Lease) -> None:
    with conn.transaction(force_rollback=True):
        assert enqueue(conn, "add", {})
    assert not work(lease)


def test_of_the_tasks_of_a_kind_that_are_still_to_begin_one_has_a_key(conn: psycopg.Connection, lease: Lease) -> None:
    handler("another")(lambda conn, task: None)
    assert enqueue(conn, "add", {"name": "a"}, key="1")
    assert enqueue(conn, "add", {"name": "b"}, key="1") is None
    assert enqueue(conn, "add", {"name": "c"}, key="2")
    assert enqueue(conn, "another", {"name": "d"}, key="1")
    work(lease)
    assert enqueue(conn, "add", {"name": "e"}, key="1")
    assert effects_of(conn) == ["a", "c"]


@pytest.mark.parametrize("state", ["retry", "abandoned"])
def test_a_task_to_be_tried_again_still_has_its_key(conn: psycopg.Connection, state: str) -> None:
    enqueue(conn, "add", {}, key="1")
    conn.execute(LEAVE, [state, 1])
    assert enqueue(conn, "add", {}, key="1") is None
    conn.execute(LEAVE, ["running", 1])
    assert enqueue(conn, "add", {}, key="1")


@pytest.mark.parametrize("again", [False, True])
def test_what_a_transaction_changed_is_seen_by_the_task_that_was_there_before(
    conn: psycopg.Connection, lease: Lease, database_url: str, again: bool
) -> None:
    """The one that wants no second task keeps the first from being taken until it has committed."""
    enqueue(conn, "add", {"name": "x"}, key="1")
    if again:
        conn.execute(LEAVE, ["retry", 1])
    with psycopg.connect(database_url) as other:
        assert enqueue(other, "add", {}, key="1") is None
        assert not work(lease)
    assert work(lease)


def test_a_key_put_in_while_its_task_runs_is_a_new_task(
    conn: psycopg.Connection, lease: Lease, database_url: str
) -> None:
    again: list[Future[int | None]] = []

    def enqueue_again() -> int | None:
        with psycopg.connect(database_url) as other:
            return enqueue(other, "look", {}, key="1")

    with ThreadPoolExecutor(1) as thread:

        @handler("look")
        def look(_: psycopg.Connection[Any], task: Task) -> None:
            again.append(thread.submit(enqueue_again))
            assert again[-1].result(timeout=20) is not None  # it waits for nobody

        enqueue(conn, "look", {}, key="1")
        work(lease)
    assert [state for _, state, _ in tasks(conn)] == ["done", "waiting"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": ""}, "must not be empty"),
        ({"run_at": datetime(2030, 1, 1)}, "'add' needs a time zone"),
        ({"payload": {"at": datetime(2030, 1, 1)}}, "'add' is no JSON: Object of type datetime"),
        ({"payload": {"x": float("nan")}}, "'add' is no JSON"),
        ({"payload": {"x": "\ud800"}}, "'add' is no JSON"),
        ({"payload": {"x": "a\0b"}}, "'add' has a NUL"),
    ],
)
def test_what_can_not_be_stored_is_refused_before_it_harms_the_transaction(
    conn: psycopg.Connection, arguments: dict[str, Any], message: str
) -> None:
    with conn.transaction(), pytest.raises(ValueError, match=message):
        enqueue(conn, **{"kind": "add", "payload": {}, **arguments})
    assert tasks(conn) == []


def test_any_text_comes_through_a_payload_as_it_was(conn: psycopg.Connection, lease: Lease) -> None:
    text = "\\u0000 \"'\n世界 👩‍💻"
    enqueue(conn, "add", {"name": text})
    work(lease)
    assert effects_of(conn) == [text]


# -- handlers


def test_a_second_handler_for_a_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'add' have two handlers"):
        handler("add")


@pytest.mark.parametrize("name", ["max_attempts", "concurrency"])
def test_a_number_below_one_is_refused_with_the_kind(name: str) -> None:
    with pytest.raises(ValueError, match=f"'other' needs {name} of at least 1, not 0"):
        handler("other", **{name: 0})


def test_its_effects_are_fenced_while_all_handlers_are_transactional() -> None:
    assert effects() == "fenced"
    handler("outside", transactional=False)(lambda lease, task: None)
    assert effects() == "external"
