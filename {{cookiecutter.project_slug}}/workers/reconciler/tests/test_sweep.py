import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from structlog.testing import capture_logs

from {{cookiecutter.project_slug}} import Lease, LeaseLost, Worker, ledger
from {{cookiecutter.project_slug}}.keys import ENV_PREFIX, SERVICE
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
SLOW = """
create function public.slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.08); return old; end';
create trigger slow before delete on public.event for each row execute function public.slow();
"""
SLOW_LEDGER = """
create function public.slow_ledger() returns trigger language plpgsql as 'begin perform pg_sleep(1.5); return old; end';
create trigger slow before delete on {{cookiecutter.project_slug}}.job_run
for each row execute function public.slow_ledger();
"""
DELETING = """
select count(*) from pg_stat_activity
where datname = current_database() and query like '%delete from%job_run%' and wait_event = 'PgSleep'
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


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def left(conn: psycopg.Connection) -> list[int]:
    return [number for (number,) in conn.execute(LEFT)]


def sweep_all(lease: Lease, rule: Rule) -> int:
    return sweep.sweep(rule, lease.transaction, lease.wait)


def test_rows_older_than_their_retention_go_batch_by_batch_oldest_first(conn: psycopg.Connection, lease: Lease) -> None:
    progress = sweep.Progress(ONE_WEEK, ONE_WEEK.batch)
    assert sweep.delete_batch(progress, lease.transaction)
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert not sweep.delete_batch(progress, lease.transaction)
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6]
    assert progress.deleted == 3


def test_a_full_batch_is_followed_by_another(conn: psycopg.Connection, lease: Lease) -> None:
    assert sweep_all(lease, ONE_WEEK) == 3
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6]
    assert sweep_all(lease, ONE_WEEK) == 0


@pytest.mark.parametrize("kind", ["timestamptz", "timestamp", "date"])
def test_any_kind_of_time_will_do_infinite_ones_too(conn: psycopg.Connection, lease: Lease, kind: str) -> None:
    conn.execute(sql.SQL("alter table public.event alter happened_at type {}").format(sql.SQL(kind)))
    conn.execute("update public.event set happened_at = '-infinity' where id in (8, 9)")
    conn.execute("update public.event set happened_at = 'infinity' where id = 7")
    assert sweep_all(lease, ONE_WEEK) == 2
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_where_narrows_a_rule(conn: psycopg.Connection, lease: Lease) -> None:
    conn.execute("update public.event set kept = id = 8")
    rule = Rule("public.event", "happened_at", keep=timedelta(days=6, hours=12), where="not old.kept")
    assert sweep_all(lease, rule) == 2
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_a_locked_row_is_waited_for_by_nobody(conn: psycopg.Connection, lease: Lease, database_url: str) -> None:
    with psycopg.connect(database_url) as other:
        other.execute("select from public.event where id = 8 for update")
        assert sweep_all(lease, ONE_WEEK) == 2
    assert left(conn) == [0, 1, 2, 3, 4, 5, 6, 8]


@pytest.mark.slow
def test_a_batch_that_takes_too_long_comes_again_with_fewer_rows(
    conn: psycopg.Connection, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "BATCH_SECONDS", 0.5)
    conn.execute(SLOW)
    with capture_logs() as logs:
        assert sweep_all(lease, Rule("public.event", "happened_at", keep=timedelta(hours=12), batch=9)) == 9
    assert left(conn) == [0]
    assert [entry["batch"] for entry in logs if entry["event"] == "sweep.slower"][0] == 4  # noqa: RUF015


def test_a_table_that_is_locked_is_waited_for_only_so_long(
    conn: psycopg.Connection, lease: Lease, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "BATCH_SECONDS", 0.05)
    with psycopg.connect(database_url) as other, capture_logs() as logs:
        other.execute("lock table public.event")
        assert sweep_all(lease, ONE_WEEK) == 0
    assert [entry["event"] for entry in logs] == ["sweep.slower", "sweep.failed"]


@pytest.mark.slow
def test_a_leader_killed_in_the_middle_of_a_batch_leaves_it_undone(
    conn: psycopg.Connection, database_url: str, tmp_path: Path, make_lease: MakeLease
) -> None:
    conn.execute(FILL_LEDGER)
    conn.execute(SLOW_LEDGER)
    before = conn.execute(PERIODS).fetchall()
    settings = {"DATABASE_URL": database_url, "RECONCILER_ENABLED": "true", "OPS_LISTEN": "off"}
    environment = os.environ | {f"{ENV_PREFIX}{name}": value for name, value in settings.items()}
    with (tmp_path / "log").open("wb") as log:
        leader = subprocess.Popen(
            [sys.executable, "-m", SERVICE, "run"], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: conn.execute(DELETING).fetchone() == (1,), 60)
    finally:
        leader.kill()
        leader.wait()
    conn.execute("drop trigger slow on {{cookiecutter.project_slug}}.job_run")  # waits for the end of that transaction
    assert conn.execute(PERIODS).fetchall() == before
    for rule in declared():
        sweep_all(make_lease("reconciler", database_url), rule)
    assert len(conn.execute(PERIODS).fetchall()) == 4


def test_a_leader_that_lost_its_lease_deletes_nothing(
    conn: psycopg.Connection, lease: Lease, make_lease: MakeLease, database_url: str
) -> None:
    make_lease("reconciler", database_url)
    with pytest.raises(LeaseLost):
        sweep_all(lease, ONE_WEEK)
    assert len(left(conn)) == 10


def test_when_asked_to_stop_it_ends_after_the_batch(conn: psycopg.Connection, lease: Lease) -> None:
    lease._term.stop("asked to")
    assert sweep_all(lease, ONE_WEEK) == 2


def test_repairs_run_between_sweeps_each_in_its_own_transaction(
    lease: Lease, leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = []

    def put_right(conn: psycopg.Connection) -> int:
        transactions.append(conn.execute("select txid_current()").fetchone())
        return 2

    monkeypatch.setattr(sweep, "repairs", lambda: [put_right])
    monkeypatch.setattr(sweep, "REPAIR_EVERY_SECONDS", 0.01)
    with capture_logs() as logs, leading(worker, lease):
        wait_until(lambda: len(transactions) >= 3)
    assert len(set(transactions)) == len(transactions)
    assert logs[0] == {"event": "sweep.repaired", "repair": "put_right", "rows": 2, "log_level": "warning"}


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
        sweep_all(lease, rule)
    assert conn.execute(RUNS_LEFT).fetchall() == [("daily", 0), ("daily", 90), ("yearly", 300), ("yearly", 700)]


def test_a_late_node_repeats_no_period_whose_row_was_swept_away(conn: psycopg.Connection, lease: Lease) -> None:
    conn.execute(FILL_LEDGER)
    before = conn.execute(PERIODS).fetchall()
    for rule in declared():
        sweep_all(lease, rule)
    assert len(conn.execute(PERIODS).fetchall()) < len(before)
    for job, period in before:
        with suppress(ledger.Refused):
            assert ledger.claim(conn, job, period) is None


@pytest.mark.parametrize("rule", declared(), ids=lambda rule: rule.table)
def test_each_shipped_rule_goes_by_an_index(conn: psycopg.Connection, rule: Rule) -> None:
    conn.execute(ORDERED)
    parameters = {"keep": rule.keep, "batch": rule.batch, "since": "-infinity"}
    explain = sql.SQL("explain (costs off) ") + sweep.statement(sweep.DELETE, rule)
    plan = "\n".join(line for (line,) in conn.execute(explain, parameters))
    assert f"({rule.column} < " in plan.partition("Index Cond: ")[2]
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
