"""The page for people, and the picture of the database behind it and the metrics."""

import re
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from {{cookiecutter.project_slug}}.config import Settings
from {{cookiecutter.project_slug}}.gates import Gate, evaluate
from {{cookiecutter.project_slug}}.gates import State as GateState
from {{cookiecutter.project_slug}}.keys import SERVICE, LeaseKey
from {{cookiecutter.project_slug}}.lease.identity import application_name
from {{cookiecutter.project_slug}}.lease.journal import Journal, RoleFacts
from {{cookiecutter.project_slug}}.operate.metrics import Metrics
from {{cookiecutter.project_slug}}.operate.page import SIGNS, page
from {{cookiecutter.project_slug}}.operate.picture import MAX_AGE, Camera, Picture
from {{cookiecutter.project_slug}}.operate.status import RoleStatus, State
from {{cookiecutter.project_slug}}.supervisor import Facts

KEY = next(iter(LeaseKey))
NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
STANDS_BY = RoleFacts(KEY.role, "standby", leads=False, epoch=0, progress_age_seconds=None, overdue_seconds=0.0)
LEADS = RoleFacts(KEY.role, "leading", leads=True, epoch=7, progress_age_seconds=3.0, overdue_seconds=0.0)
HOSTILE = "<script>alert('&\"')</script>"

RUNS = """
insert into {{cookiecutter.project_slug}}.job_run (job, period, state, attempt, started_at, finished_at)
values ('nightly', now() - interval '26 hours', 'succeeded', 1, now() - interval '26 hours', now() - interval '25 hours'),
       ('nightly', now() - interval '2 hours', 'failed', 3, now() - interval '2 hours', now() - interval '1 hour')
"""
PLAN = """
insert into {{cookiecutter.project_slug}}.job (name, role, schedule, next_period)
values ('nightly', 'x', '0 2 * * *', now() - interval '20 min'), ('weekly', 'x', 'every 7d', now() + interval '3 days')
"""
TASKS = """
insert into {{cookiecutter.project_slug}}.task (kind, run_at)
values ('mail', now() - interval '5 min'), ('mail', now()), ('mail', now() + interval '1 day')
"""
READERS = "select count(*) from pg_stat_activity where application_name = %s and datname = current_database()"


def facts(role: RoleFacts = STANDS_BY) -> Facts:
    journal = Journal("4711-0123abcd@here", [KEY])
    journal.connection = "open"
    return Facts("4711-0123abcd@here", [role], journal, loop_alive=True, stopping=False)


def status(state: State, holder: str | None = "4712-0123abcd@there") -> RoleStatus:
    return RoleStatus(KEY.role, KEY.value, state, holder, 99, None, 7, NOW, 192.0, 0.4, None, ["4711-0123abcd@here"])


def shown(picture: Picture, subject: Facts | None = None, gates: list[Gate] | None = None) -> str:
    return page(subject or facts(), evaluate() if gates is None else gates, picture, NOW).body


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.partition("</style>")[2]))


@pytest.mark.parametrize("state", State)
def test_a_role_is_shown_by_word_and_sign(state: State) -> None:
    text = words(shown(Picture(roles=[status(state)])))
    assert f"{SIGNS[state]}{state.value} · 1 standing by" in text
    assert "4712-0123abcd@there (pid 99)" in text
    assert "2026-11-30 03:00:00 UTC, 3m12s" in text
    assert "0.4 s ago" in text


def test_signs_tell_the_states_apart_without_colour() -> None:
    assert len(set(SIGNS.values())) == len(State)


def test_progress_is_told_where_the_worker_runs() -> None:
    assert "3 s ago, here" in words(shown(Picture(roles=[status(State.LEADING)]), facts(LEADS)))
    assert "ago, here" not in words(shown(Picture(roles=[status(State.LEADING)])))


def test_takeovers_are_those_that_this_replica_saw_the_latest_first() -> None:
    subject = facts()
    subject.journal.acquired(KEY, 8)
    subject.journal._begun(KEY, 9, "4713-0123abcd@there")
    text = words(shown(Picture(), subject))
    assert "Only those that this replica saw itself" in text
    assert text.index(" 9 4713-0123abcd@there") < text.index(" 8 4711-0123abcd@here")


def test_what_others_may_write_is_text() -> None:
    subject = facts()
    subject.journal._begun(KEY, 9, HOSTILE)
    gate = Gate(HOSTILE, None, False, HOSTILE, GateState.REFUSED, "")
    html = shown(Picture(problem=HOSTILE, roles=[status(State.COLLISION, HOSTILE)]), subject, [*evaluate(), gate])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 4


def test_it_needs_nothing_from_elsewhere() -> None:
    html = shown(Picture(roles=[status(State.LEADING)]))
    assert "<script" not in html
    assert "http:" not in html
    assert "https:" not in html
    assert "http-equiv=refresh" in html


def test_jobs_have_their_last_and_next_run(conn: psycopg.Connection, database_url: str) -> None:
    conn.execute(RUNS)
    conn.execute(PLAN)
    text = words(shown(Camera(Settings(database_url=SecretStr(database_url))).take()))
    assert re.search(r"nightly 0 2 \* \* \* failed, \S+ \S+ UTC \S+ \S+ UTC ⚠ overdue by 20m\d\ds", text)
    assert re.search(r"weekly every 7d never \S+ \S+ UTC ", text)


def test_without_a_database_it_says_so_and_what_the_replica_knows_without_a_secret() -> None:
    picture = Camera(Settings(database_url=SecretStr("postgresql://u:hunter2@127.0.0.1:1/d"))).take()
    html = shown(picture, facts(LEADS))
    assert "The database gives no answer: 127.0.0.1:1/d" in words(html)
    assert "leading" in words(html)
    assert "hunter2" not in html


def test_before_migrating_it_says_so(empty_database_url: str) -> None:
    camera = Camera(Settings(database_url=SecretStr(empty_database_url)))
    assert "does not exist" in str(camera.take().problem)
    assert camera.failures == 1


# -- the picture


def test_many_readers_make_one_look(database_url: str) -> None:
    camera = Camera(Settings(database_url=SecretStr(database_url)))
    pictures: list[Picture] = []
    readers = [threading.Thread(target=lambda: pictures.append(camera.take())) for _ in range(20)]
    started = time.monotonic()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    looks = len({id(picture) for picture in pictures})
    assert len(pictures) == 20
    assert looks <= 1 + (time.monotonic() - started) / MAX_AGE


def test_a_look_leaves_no_session_behind(database_url: str, conn: psycopg.Connection) -> None:
    assert Camera(Settings(database_url=SecretStr(database_url))).take().problem is None
    deadline = time.monotonic() + 10
    while conn.execute(READERS, [f"{SERVICE}.ops"]).fetchone() != (0,):
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_server_that_never_answers_costs_seconds_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"postgresql://u:hunter2@127.0.0.1:{deaf.getsockname()[1]}/d"
        started = time.monotonic()
        picture = Camera(Settings(database_url=SecretStr(url))).take()
        assert picture.problem is not None
        assert time.monotonic() - started < 8


def test_a_takeover_is_shown_as_pg_locks_has_it(conn: psycopg.Connection, database_url: str) -> None:
    camera = Camera(Settings(database_url=SecretStr(database_url)))
    name = application_name("4714-0123abcd@there")
    with psycopg.connect(make_conninfo(database_url, application_name=name), autocommit=True) as holder:
        holder.execute("select pg_advisory_lock(%s)", [KEY])
        text = words(shown(camera.take()))
        assert f"◐ waiting · 0 standing by 4714-0123abcd@there (pid {holder.info.backend_pid})" in text


# -- the metrics that come from the database


def figures(subject: Facts, camera: Camera) -> dict[tuple[str, tuple[str, ...]], float]:
    text = Metrics(lambda: subject, evaluate(), camera).answer().body
    return {
        (sample.name.removeprefix(f"{SERVICE}_"), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith((f"{SERVICE}_job", f"{SERVICE}_task", f"{SERVICE}_database"))
    }


def test_a_leader_tells_of_jobs_and_a_stand_by_does_not(conn: psycopg.Connection, database_url: str) -> None:
    conn.execute(RUNS)
    conn.execute(PLAN)
    camera = Camera(Settings(database_url=SecretStr(database_url)))
    told = figures(facts(LEADS), camera)
    assert told["job_runs", ("nightly", "failed")] == 1
    assert ("job_runs", ("nightly", "succeeded")) not in told, "more than a day ago"
    assert told["job_overdue_seconds", ("nightly",)] == pytest.approx(1200, abs=60)
    assert told["job_overdue_seconds", ("weekly",)] == 0
    success = datetime.fromtimestamp(told["job_last_success_timestamp_seconds", ("nightly",)], UTC)
    assert datetime.now(UTC) - success == pytest.approx(timedelta(hours=25), abs=timedelta(minutes=1))
    assert figures(facts(STANDS_BY), camera) == {("database_read_failures_total", ()): 0}


def test_a_database_that_is_away_is_counted_and_ends_no_scrape() -> None:
    camera = Camera(Settings(database_url=SecretStr("postgresql://127.0.0.1:1/d")))
    assert figures(facts(LEADS), camera) == {("database_read_failures_total", ()): 1}


@pytest.mark.skipif(find_spec(f"{SERVICE}.task") is None, reason="this service has no task queue")
def test_a_leader_tells_of_tasks(conn: psycopg.Connection, database_url: str) -> None:
    conn.execute(TASKS)
    camera = Camera(Settings(database_url=SecretStr(database_url)))
    told = figures(facts(LEADS), camera)
    assert (told["tasks", ("waiting",)], told["tasks", ("running",)], told["tasks", ("dead",)]) == (2, 0, 0)
    assert told["tasks_oldest_age_seconds", ()] == pytest.approx(300, abs=60)
    assert re.search(r"2 due, the first one for 5m\d\ds · 0 running · 0 dead", words(shown(camera.take())))


def test_a_service_without_a_queue_tells_of_none(database_url: str) -> None:
    camera: Any = Camera(Settings(database_url=SecretStr(database_url)))
    camera._backlog = None
    assert not any(name.startswith("task") for name, _ in figures(facts(LEADS), camera))
