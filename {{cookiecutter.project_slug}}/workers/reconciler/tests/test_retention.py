"""The rules in the hands of a person: `sweep`, `sweep --dry-run`, and what `doctor` says about them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from pydantic import SecretStr

from {{cookiecutter.project_slug}} import gates
from {{cookiecutter.project_slug}}.cli import main
from {{cookiecutter.project_slug}}.config import Settings
from {{cookiecutter.project_slug}}.keys import DISTRIBUTION, ENV_PREFIX
from {{cookiecutter.project_slug}}.operate.doctor import Result, examine
from {{cookiecutter.project_slug}}_reconciler import retention
from {{cookiecutter.project_slug}}_reconciler.rules import Rule

EVENTS = """
create table public.event (id integer primary key, happened_at timestamptz not null, "Odd one" timestamptz);
insert into public.event (id, happened_at) select n, now() - n * interval '1 day' from generate_series(0, 9) as n;
"""
INDEX = "create index on public.event (happened_at)"
COUNT = "select count(*) from public.event"
ONE_WEEK = Rule("public.event", "happened_at", keep=timedelta(days=6, hours=12), batch=2)


@pytest.fixture(autouse=True)
def events(conn: psycopg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}DATABASE_URL", database_url)
    conn.execute(EVENTS)


@contextmanager
def rules(monkeypatch: pytest.MonkeyPatch, *given: Rule) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(retention, "declared", lambda: list(given))
        yield


def test_a_dry_run_shows_what_would_go_and_deletes_nothing(
    conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with rules(monkeypatch, ONE_WEEK, Rule("public.event", "happened_at", keep=timedelta(days=99))):
        assert main(["sweep", "--dry-run"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("public.event: happened_at older than 6 days, 12:00:00: 3 rows would go, the oldest of 20")
    assert second == "public.event: happened_at older than 99 days, 0:00:00: 0 rows would go"
    assert conn.execute(COUNT).fetchone() == (10,)


def test_a_count_ends_early(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(retention, "COUNT_LIMIT", 2)
    with rules(monkeypatch, ONE_WEEK):
        assert main(["sweep", "--dry-run"]) == 0
    assert "2 rows or more would go" in capsys.readouterr().out


def test_a_sweep_by_hand_deletes_the_same_rows(
    conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with rules(monkeypatch, ONE_WEEK):
        assert main(["sweep"]) == 0
    assert capsys.readouterr().out.endswith("3 rows deleted\n")
    assert conn.execute(COUNT).fetchone() == (7,)


def test_a_rule_that_the_database_refuses_is_told_after_the_others_were_looked_at(
    conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with rules(monkeypatch, Rule("public.missing", "at", keep=timedelta(days=1)), ONE_WEEK):
        assert main(["sweep"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert 'refused: relation "public.missing" does not exist' in first
    assert second.endswith("3 rows deleted")


def test_without_the_worker_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gates, "entry_points", lambda **_: [])
    assert main(["sweep", "--dry-run"]) == 78
    assert f"Install it: uv sync --extra reconciler, or: pip install '{DISTRIBUTION}[" in capsys.readouterr().err


def found(url: str) -> list[tuple[Result, str, str]]:
    checks = examine(Settings(database_url=SecretStr(url)))
    return [(check.result, check.seen, check.hint) for check in checks if check.name == "worker set-up"]


def test_doctor_is_content_with_the_shipped_rules(database_url: str) -> None:
    assert [result for result, _, _ in found(database_url)] == [Result.OK]


def test_doctor_reports_a_missing_table_a_missing_column_and_one_without_an_index(
    conn: psycopg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = timedelta(days=1)
    with rules(
        monkeypatch,
        Rule("public.missing", "happened_at", keep=day),
        Rule("public.event", "missing", keep=day),
        Rule("public.event", "Odd one", keep=day),
        Rule("public.event", "happened_at", keep=day, where="old.nothing"),
        ONE_WEEK,
    ):
        assert [(result, seen.split(": ", 2)[2], hint) for result, seen, hint in found(database_url)] == [
            (Result.FAIL, 'relation "public.missing" does not exist', HINT),
            (Result.FAIL, "column old.missing does not exist", HINT),
            (Result.FAIL, NO_INDEX, 'create index concurrently on "public"."event" ("Odd one")'),
            (Result.FAIL, "column old.nothing does not exist", HINT),
            (Result.FAIL, NO_INDEX, 'create index concurrently on "public"."event" ("happened_at")'),
        ]
        conn.execute(INDEX)
        assert [seen for _, seen, _ in found(database_url)][-1].endswith("old.nothing does not exist")


def test_doctor_takes_a_partial_index_for_what_it_is(
    conn: psycopg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("create index on public.event (happened_at) where id > 3")
    fits = Rule("public.event", "happened_at", keep=timedelta(days=1), where="old.id > 3")
    with rules(monkeypatch, fits, ONE_WEEK):
        assert [seen.split(": ", 2)[2] for _, seen, _ in found(database_url)] == [NO_INDEX]


NO_INDEX = "no index begins with the column, so each batch would read the whole table"
HINT = "correct the rule in the package {{cookiecutter.project_slug}}_reconciler.rules, or add what it names"
