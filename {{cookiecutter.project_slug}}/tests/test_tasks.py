"""`tasks list|retry|discard`, with the table alone: no worker is installed that they need."""

import json
from typing import Any

import psycopg
import pytest

from {{cookiecutter.project_slug}}.cli import main
from {{cookiecutter.project_slug}}.keys import DISTRIBUTION, ENV_PREFIX
from {{cookiecutter.project_slug}}.operate import tasks
from {{cookiecutter.project_slug}}.task import enqueue

STATES = ("dead", "abandoned", "running", "retry", "waiting", "done")
SET_STATE = """
update {{cookiecutter.project_slug}}.task
set state = %s, attempts = 3, error = %s, finished_at = case when %s in ('done', 'dead') then now() end
where id = %s
"""
READ = "select kind, state, attempts from {{cookiecutter.project_slug}}.task where run_at <= now() order by id"
ERROR = "ValueError: of\nmany lines postgresql://u:hunter2@host/d " + "and more " * 20


@pytest.fixture(autouse=True)
def queue(conn: psycopg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task in each state, with ids from 1 in the order of STATES; `retry` is due in an hour."""
    monkeypatch.setenv(f"{ENV_PREFIX}DATABASE_URL", database_url)
    monkeypatch.setenv("COLUMNS", "150")
    for number, state in enumerate(STATES, 1):
        enqueue(conn, state, {"n": number}, key="k" if state == "waiting" else None)
        if state != "waiting":
            conn.execute(SET_STATE, [state, ERROR if state == "dead" else None, state, number])
    conn.execute("update {{cookiecutter.project_slug}}.task set run_at = now() + interval '1 h' where kind = 'retry'")


def rows(conn: psycopg.Connection) -> list[tuple[Any, ...]]:
    return conn.execute(READ).fetchall()


def test_all_but_the_done_are_listed_the_worst_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "KIND", "STATE", "ATTEMPTS", "RUN", "AT", "KEY", "ERROR"]
    assert [line.split()[2] for line in lines] == ["dead", "abandoned", "running", "retry", "waiting"]
    assert "ValueError: of many lines" in lines[0]
    assert lines[0].endswith("…")
    assert "hunter2" not in lines[0]


@pytest.mark.parametrize("state", STATES)
def test_a_list_can_be_narrowed_to_a_state_and_a_kind(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "list", "--state", state, "--kind", state, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["id"], found["state"], found["payload"]) == (STATES.index(state) + 1, state, {"n": found["id"]})
    assert main(["tasks", "list", "--state", state, "--kind", "other"]) == 0
    assert capsys.readouterr().out == "no such task\n"


def test_a_list_is_limited(conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        enqueue(conn, "more", {})
    main(["tasks", "list", "--state", "waiting", "--limit", "3"])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_dead_task_gets_all_its_attempts_again_and_others_are_due_now(
    conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(conn.info.dsn, autocommit=True) as listener:
        listener.execute('listen "{{cookiecutter.project_slug}}.task"')
        assert main(["tasks", "retry", "1", "2", "4", "5"]) == 0
        assert list(listener.notifies(timeout=10, stop_after=1)), "the poller is woken"
    assert capsys.readouterr().out == "4 tasks to be run now\n"
    assert rows(conn) == [
        ("dead", "retry", 0),
        ("abandoned", "abandoned", 3),
        ("running", "running", 3),
        ("retry", "retry", 3),
        ("waiting", "waiting", 0),
        ("done", "done", 3),
    ]


def test_discarded_tasks_are_gone(conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "discard", "1"]) == 0
    assert capsys.readouterr().out == "1 task discarded\n"
    assert main(["tasks", "discard", "2", "4", "5"]) == 0
    assert [kind for kind, _, _ in rows(conn)] == ["running", "done"]


@pytest.mark.parametrize("command", ["retry", "discard"])
@pytest.mark.parametrize(("other", "message"), [
    ("99", "there is no task 99"),
    ("3", "task 3 is running"),
    ("6", "task 6 is done; to do it again, enqueue another"),
])  # fmt: skip
def test_if_one_can_not_be_decided_about_none_is(
    command: str, other: str, message: str, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows(conn)
    assert main(["tasks", command, "1", other]) == 1
    assert capsys.readouterr().err == f"{DISTRIBUTION}: {message}; nothing was changed\n"
    assert rows(conn) == before


@pytest.mark.parametrize("command", ["retry", "discard"])
def test_all_dead_ones_of_a_kind_or_of_all_are_decided_about_in_portions(
    command: str, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PORTION", 2)
    for number in range(7, 12):
        enqueue(conn, "mail", {})
        conn.execute(SET_STATE, ["dead", ERROR, "dead", number])
    assert main(["tasks", command, "--dead", "--kind", "mail"]) == 0
    assert capsys.readouterr().out.startswith("5 tasks ")
    assert main(["tasks", command, "--dead"]) == 0
    assert capsys.readouterr().out.startswith("1 task ")


@pytest.mark.parametrize("arguments", [[], ["1", "--dead"], ["1", "--kind", "mail"], ["--kind", "mail"]])
def test_what_to_decide_about_must_be_said_in_one_way(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "retry", *arguments]) == 2
    assert "give either the ids of tasks, or --dead" in capsys.readouterr().err


def test_without_the_table_it_says_what_to_type(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}DATABASE_URL", empty_database_url)
    assert main(["tasks", "list"]) == 78
    assert f"run: {DISTRIBUTION} migrate" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "retry", "discard"])
def test_each_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tasks", command, "--help"])
    assert f"{DISTRIBUTION} tasks {command}" in capsys.readouterr().out.partition("example:")[2]
