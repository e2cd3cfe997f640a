import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql
from structlog.testing import capture_logs

from {{cookiecutter.project_slug}} import Lease, LeaseLost, Worker, ledger
from {{cookiecutter.project_slug}}_reconciler import sweep, worker
from {{cookiecutter.project_slug}}_reconciler.rules import Rule, declared

MakeLease = Callable[[str, str], Lease]
Leading = Callable[[Worker, Lease], AbstractContextManager[None]]

EVENTS = """
create table public.event (id integer, happened_at timestamptz not null, kept boolean not null default false);
create index on public.event (happened_at);
insert into public.event (id, happened_at) select n, now() - n * interval '1 day' from generate_series(0, 9) as n;
"""
LEFT = "select id from public.event order by id"
FILL_LEDGER = """
insert into {{cookiecutter.project_slug}}.job_run (job, period, state)
select job, now() - days * interval '1 day' - interval '1 hour', state
from (values
    ('daily', 0, 'succeeded'), ('daily', 90, 'succeeded'), ('daily', 91, 'succeeded'), ('daily', 92, 'succeeded'),
    ('yearly', 300, 'failed'), ('yearly', 700, 'succeeded'), ('yearly', 1000, 'succeeded')
) as run (job, days, state)
"""
RUNS_LEFT = """
select job, round(extract(epoch from now() - period) / 86400)::integer from {{cookiecutter.project_slug}}.job_run
order by 1, 2
"""
PERIODS = "select job, period from {{cookiecutter.project_slug}}.job_run"
ORDERED = "set enable_seqscan = off; set enable_bitmapscan = off; set enable_sort = off"  # were the table large
ONE_WEEK = Rule("public.event", "happened_at", keep=timedelta(days=6, hours=12), batch=2)


@pytest.fixture(autouse=True)
def events(conn: psycopg.Connection) -> None:
    conn.execute(EVENTS)


@pytest.fixture
def lease(make_lease: MakeLease, database_url: str) -> Lease:
    return make_lease("reconciler", database_url)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def left(conn: psycopg.Connection) -> list[int]:
    return [number for (number,) in conn.execute(LEFT)]


def test_rows_older_than_their_retention_go_batch_by_batch_oldest_first(conn: psycopg.Connection, lease: Lease) -> None:
    assert sweep.delete_batch(lease, ONE_WEEK) == 2
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sweep.sweep(lease, ONE_WEEK) == 1
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6]
    assert sweep.sweep(lease, ONE_WEEK) == 0


def test_a_full_batch_is_followed_by_another(conn: psycopg.Connection, lease: Lease) -> None:
    assert sweep.sweep(lease, ONE_WEEK) == 3
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6]


def test_where_narrows_a_rule(conn: psycopg.Connection, lease: Lease) -> None:
    conn.execute("update public.event set kept = id = 8")
    rule = Rule("public.event", "happened_at", keep=timedelta(days=6, hours=12), where="not old.kept")
    assert sweep.sweep(lease, rule) == 2
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_a_locked_row_is_waited_for_by_nobody(conn: psycopg.Connection, lease: Lease, database_url: str) -> None:
    with psycopg.connect(database_url) as other:
        other.execute("select from public.event where id = 8 for update")
        assert sweep.sweep(lease, ONE_WEEK) == 2
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_a_leader_that_lost_its_lease_deletes_nothing(
    conn: psycopg.Connection, lease: Lease, make_lease: MakeLease, database_url: str
) -> None:
    make_lease("reconciler", database_url)
    with pytest.raises(LeaseLost):
        sweep.sweep(lease, ONE_WEEK)
    assert len(left(conn)) == 10


def test_when_asked_to_stop_it_ends_after_the_batch(conn: psycopg.Connection, lease: Lease) -> None:
    lease._term.stop("asked to")
    assert sweep.sweep(lease, ONE_WEEK) == 2


def test_a_rule_whose_table_is_missing_does_not_stop_the_others(
    conn: psycopg.Connection, lease: Lease, leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Rule("public.missing", "happened_at", keep=timedelta(days=1))
    monkeypatch.setattr(sweep, "declared", lambda: [missing, ONE_WEEK])
    with capture_logs() as logs, leading(worker, lease):
        wait_until(lambda: len(logs) == 2)
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6]
    assert [(entry["event"], entry["table"]) for entry in logs] == [
        ("sweep.failed", "public.missing"),
        ("sweep.finished", "public.event"),
    ]


def test_the_ledger_is_kept_for_as_long_as_a_period_can_be_claimed_and_the_last_run_for_ever(
    conn: psycopg.Connection, lease: Lease
) -> None:
    conn.execute(FILL_LEDGER)
    for rule in declared():
        sweep.sweep(lease, rule)
    assert conn.execute(RUNS_LEFT).fetchall() == [("daily", 0), ("daily", 90), ("yearly", 300), ("yearly", 700)]


def test_a_late_node_repeats_no_period_whose_row_was_swept_away(conn: psycopg.Connection, lease: Lease) -> None:
    conn.execute(FILL_LEDGER)
    before = conn.execute(PERIODS).fetchall()
    for rule in declared():
        sweep.sweep(lease, rule)
    assert len(conn.execute(PERIODS).fetchall()) < len(before)
    for job, period in before:
        with suppress(ledger.Refused):
            assert ledger.claim(conn, job, period) is None


@pytest.mark.parametrize("rule", declared(), ids=lambda rule: rule.table)
def test_each_shipped_rule_goes_by_an_index(conn: psycopg.Connection, rule: Rule) -> None:
    conn.execute(ORDERED)
    parameters = {"keep": rule.keep, "batch": rule.batch}
    explain = sql.SQL("explain (costs off) ") + sweep.statement(rule)
    plan = "\n".join(line for (line,) in conn.execute(explain, parameters))
    assert f"Index Cond: ({rule.column} < " in plan
    assert "Sort" not in plan


@pytest.mark.parametrize(
    ("table", "keep", "batch", "message"),
    [
        ("event", timedelta(days=1), 1, "with its schema"),
        ("public.event", timedelta(0), 1, "would delete every row"),
        ("public.event", timedelta(days=1), 0, "at least one row"),
    ],
)
def test_a_rule_that_is_wrong_is_refused_with_its_table(table: str, keep: timedelta, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"event': .*{message}"):
        Rule(table, "happened_at", keep=keep, batch=batch)
