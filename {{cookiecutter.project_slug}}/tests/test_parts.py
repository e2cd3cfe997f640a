"""Start and stop are one contract: whatever runs in a thread of its own obeys it, tested here once for all."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
import pytest
from pydantic import SecretStr

from {{cookiecutter.project_slug}} import Worker
from {{cookiecutter.project_slug}}.config import Settings
from {{cookiecutter.project_slug}}.keys import LeaseKey
from {{cookiecutter.project_slug}}.lease.elector import Elector
from {{cookiecutter.project_slug}}.operate.endpoints import Answer, Endpoints
from {{cookiecutter.project_slug}}.schema import LATEST
from {{cookiecutter.project_slug}}.supervisor import StopSignals, Supervisor

KEY = next(iter(LeaseKey))
LOCKS = """
select count(*) from pg_locks
 where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())
"""


@dataclass
class Part:
    run: Callable[[], object]
    stop: Callable[[], object]


def supervisor(settings: Settings) -> Part:
    def work(lease: object) -> None:
        while lease.wait(60):  # type: ignore[attr-defined]
            pass

    subject = Supervisor(settings, {KEY.role: Worker(work)})
    return Part(lambda: subject.run(StopSignals()), subject.stop)


def idle_supervisor(settings: Settings) -> Part:
    subject = Supervisor(settings, {})
    return Part(lambda: subject.run(StopSignals()), subject.stop)


def elector(settings: Settings) -> Part:
    subject = Elector(
        settings.lease_url, "i0", settings.timing, {KEY: False}, lambda term: term.ended.set(), lambda role: None, 0.5,
        LATEST,
    )  # fmt: skip
    return Part(subject.run, subject.stop)


def endpoints(_: Settings) -> Part:
    subject = Endpoints("127.0.0.1", 0, {"/": lambda: Answer("ok")})
    return Part(subject.run, subject.stop)


@pytest.fixture(params=[supervisor, idle_supervisor, elector, endpoints])
def make(request: pytest.FixtureRequest, database_url: str) -> Iterator[Callable[[], Part]]:
    settings = Settings(database_url=SecretStr(database_url), drain_timeout_seconds=5)
    yield lambda: request.param(settings)
    with psycopg.connect(database_url, autocommit=True) as conn:
        deadline = time.monotonic() + 10
        while conn.execute(LOCKS).fetchone() != (0,):
            assert time.monotonic() < deadline, "a lock was left behind"


def begin(part: Part) -> threading.Thread:
    thread = threading.Thread(target=part.run, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(20)
    return not thread.is_alive()


def test_stop_before_start_means_that_it_ends_at_once(make: Callable[[], Part]) -> None:
    part = make()
    part.stop()
    assert ended(begin(part))


def test_a_second_stop_changes_nothing(make: Callable[[], Part]) -> None:
    part = make()
    thread = begin(part)
    part.stop()
    part.stop()
    assert ended(thread)
    part.stop()


def test_stop_while_starting_is_heard(make: Callable[[], Part]) -> None:
    for step in range(12):
        part = make()
        thread = begin(part)
        moment = time.monotonic() + step * 0.005  # from before the first statement to after the first heartbeat
        while time.monotonic() < moment:
            pass
        part.stop()
        assert ended(thread)


def test_several_threads_may_stop_it_at_once(make: Callable[[], Part]) -> None:
    part = make()
    thread = begin(part)
    stops = [threading.Thread(target=part.stop) for _ in range(8)]
    for stop in stops:
        stop.start()
    for stop in stops:
        stop.join()
    assert ended(thread)
