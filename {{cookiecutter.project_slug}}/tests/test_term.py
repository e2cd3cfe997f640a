"""What a worker sees of its lease: told to end by a stop, a loss or a deadline, in a thread or in an event loop."""

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

from {{ cookiecutter.project_slug }} import Lease, LeaseLost, Worker
from {{ cookiecutter.project_slug }}.keys import LeaseKey
from {{ cookiecutter.project_slug }}.lease.term import Term, clock
from {{ cookiecutter.project_slug }}.worker import run_worker

KEY = next(iter(LeaseKey))


def term(seconds: float = 60) -> Term:
    return Term(KEY, 1, clock() + seconds)


def test_wait_sleeps_its_time() -> None:
    started = time.monotonic()
    assert term().wait(0.05)
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("end", [Term.stop, Term.lose])
def test_wait_ends_at_once_when_told(end: Callable[[Term, str], None]) -> None:
    subject = term()
    threading.Timer(0.05, end, [subject, "told"]).start()
    started = time.monotonic()
    assert not subject.wait(5)
    assert time.monotonic() - started < 4
    with pytest.raises(LeaseLost, match="told"):
        subject.check()


def test_wait_ends_at_the_deadline_without_being_told() -> None:
    subject = term(0.05)
    started = time.monotonic()
    assert not subject.wait(5)
    assert time.monotonic() - started < 4
    assert not subject.held


def test_a_renewal_reaches_a_worker_that_is_waiting() -> None:
    subject = term(0.1)
    assert subject.renew(clock() + 60)
    assert subject.wait(0.2)


def test_a_lost_term_is_not_renewed() -> None:
    subject = term(0)
    assert not subject.renew(clock() + 60)
    assert not subject.held


def test_a_term_asked_to_stop_is_still_held() -> None:
    subject = term()
    subject.stop("asked")
    assert subject.held
    assert subject.renew(clock() + 60)
    with pytest.raises(LeaseLost, match="asked"):
        subject.check()


def test_a_forked_child_never_holds_the_lease() -> None:
    subject = term()
    pid = os.fork()
    if pid == 0:
        os._exit(1 if subject.held else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert subject.held


def test_an_async_worker_is_cancelled_when_told(make_lease: Callable[[str, str], Lease], database_url: str) -> None:
    cleaned = threading.Event()

    async def run(lease: Lease) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    lease = make_lease(KEY.role, database_url)
    threading.Timer(0.05, lease._term.stop, ["asked"]).start()
    with pytest.raises(LeaseLost, match="asked"):
        run_worker(Worker(run), lease, lease._term)
    assert cleaned.is_set()


def test_an_async_worker_takes_no_step_after_its_deadline(
    make_lease: Callable[[str, str], Lease], database_url: str
) -> None:
    steps = []

    async def run(lease: Lease) -> None:
        while True:
            await asyncio.sleep(0)
            steps.append(lease.held)
            time.sleep(0.01)  # holds the event loop, as a pause of the process does

    lease = make_lease(KEY.role, database_url)
    lease._term.renew(clock() + 0.1)
    with pytest.raises(LeaseLost):
        run_worker(Worker(run), lease, lease._term)
    assert steps
    assert all(steps)


def test_async_transactions_are_fenced_too(make_lease: Callable[[str, str], Lease], database_url: str) -> None:
    epochs = []

    async def run(lease: Lease) -> None:
        async with lease.transaction() as conn:
            row = await (await conn.execute("select max(epoch) from {{ cookiecutter.project_slug }}.lease")).fetchone()
            assert row is not None
            epochs.append(row[0])
        make_lease(KEY.role, database_url)  # a successor begins
        async with lease.transaction():
            epochs.append("never")

    lease = make_lease(KEY.role, database_url)
    with pytest.raises(LeaseLost, match="successor"):
        run_worker(Worker(run), lease, lease._term)
    assert epochs == [1]


def test_a_term_that_was_lost_before_it_began_runs_nothing(
    make_lease: Callable[[str, str], Lease], database_url: str
) -> None:
    ran = threading.Event()
    lease = make_lease(KEY.role, database_url)
    lease._term.lose("too late")
    with pytest.raises(LeaseLost, match="too late"):
        run_worker(Worker(lambda _: ran.set()), lease, lease._term)
    assert not ran.is_set()


def test_what_a_worker_raises_comes_through(make_lease: Callable[[str, str], Lease], database_url: str) -> None:
    async def fails(lease: Lease) -> None:
        raise ZeroDivisionError

    lease = make_lease(KEY.role, database_url)
    with pytest.raises(ZeroDivisionError):
        run_worker(Worker(fails), lease, lease._term)
