"""The lease on a real PostgreSQL: its session, its fenced transaction, its loop."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from {{ cookiecutter.project_slug }} import Lease, LeaseLost, Worker
from {{ cookiecutter.project_slug }}.config import Settings, Timing
from {{ cookiecutter.project_slug }}.keys import CHANNEL, LeaseKey
from {{ cookiecutter.project_slug }}.lease.decision import Doubt
from {{ cookiecutter.project_slug }}.lease.elector import Elector
from {{ cookiecutter.project_slug }}.lease.journal import ACQUIRED
from {{ cookiecutter.project_slug }}.lease.session import SchemaOutdated, Session, Wake, _open_sessions
from {{ cookiecutter.project_slug }}.lease.term import (
    EXPIRED,
    SESSION_ENDED,
    STEPPED_DOWN,
    STOPPING,
    WORKER_ENDED,
    Term,
)
from {{ cookiecutter.project_slug }}.schema import LATEST
from {{ cookiecutter.project_slug }}.supervisor import StopSignals, Supervisor

KEY = next(iter(LeaseKey))
QUICK = Timing(interval=0.2, ttl=1.5, stop_grace=0.5)

HELD_BY = """
select pid from pg_locks where locktype = 'advisory' and objid::bigint = %s and granted
   and database = (select oid from pg_database where datname = current_database())
"""


WAITING = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


def until(condition: Callable[[], Any], what: str, timeout: float = 20) -> Any:
    """Poll a condition; its value once it is true."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)
    return value


@pytest.fixture
def open_session(database_url: str) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def open_one(timing: Timing = QUICK) -> Session:
        sessions.append(Session.open(database_url, f"i{len(sessions)}", timing, list(LeaseKey), LATEST))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def won(session: Session) -> bool:
    return session.heartbeat([KEY], [KEY]).seen[KEY].won


# -- the session


def test_one_session_wins_and_others_see_who_holds_the_lock(open_session: Callable[..., Session]) -> None:
    first, second = open_session(), open_session()
    assert won(first)
    seen = second.heartbeat([KEY], [KEY]).seen[KEY]
    assert not seen.won
    assert not seen.held
    assert seen.holder is not None
    assert seen.holder.name is not None
    assert seen.holder.name.endswith(" i0")
    assert seen.holder.heard is not None


def test_heartbeats_confirm_the_lock_and_never_take_it_again(open_session: Callable[..., Session]) -> None:
    first, second = open_session(), open_session()
    assert won(first)
    for _ in range(5):
        seen = first.heartbeat([KEY], [KEY]).seen[KEY]  # even when asked to try
        assert seen.held
        assert not seen.won
    first.release(KEY, None)
    assert won(second)


@pytest.mark.slow
def test_the_server_ends_a_silent_session_after_its_ttl(
    open_session: Callable[..., Session], conn: psycopg.Connection
) -> None:
    session = open_session()
    assert won(session)
    started = time.monotonic()
    until(lambda: conn.execute(HELD_BY, [KEY]).fetchone() is None, "the lock is free", QUICK.ttl + 4)
    assert QUICK.ttl - 0.1 <= time.monotonic() - started < QUICK.ttl + 1
    with pytest.raises(psycopg.OperationalError):
        session.heartbeat([KEY], [])


def test_a_heartbeat_in_a_session_that_is_not_ours_any_more_is_a_doubt(open_session: Callable[..., Session]) -> None:
    session = open_session()
    # what another client leaves behind on a server process that a pooler hands round
    session._conn.execute("select set_config('{{ cookiecutter.project_slug }}.canary', 'theirs', false)")
    with pytest.raises(Doubt):
        session.heartbeat([KEY], [KEY])
    assert session._conn.execute(HELD_BY, [KEY]).fetchone() is None, "locked in a session that is not ours"


def test_a_released_lease_wakes_those_who_wait(open_session: Callable[..., Session]) -> None:
    first, second = open_session(), open_session()
    assert won(first)
    first.release(KEY, None)
    assert second.wait(10, Wake()) == [f"released {KEY.role}"]


def test_a_release_that_is_told_with_the_answer_to_a_statement_wakes_too(open_session: Callable[..., Session]) -> None:
    first, second = open_session(Timing()), open_session(Timing())
    assert won(first)
    first.release(KEY, None)
    second.heartbeat([KEY], [])
    started = time.monotonic()
    assert second.wait(10, Wake()) == [f"released {KEY.role}"]
    assert time.monotonic() - started < 5


def test_an_ended_session_wakes_its_owner(open_session: Callable[..., Session], conn: psycopg.Connection) -> None:
    session = open_session()
    assert won(session)
    conn.execute("select pg_terminate_backend(pid) from (" + HELD_BY + ") as l", [KEY])
    started = time.monotonic()
    with suppress(psycopg.OperationalError):  # as its last words have or haven't been read yet
        assert session.wait(10, Wake()) is None
    assert time.monotonic() - started < 2


def test_each_epoch_is_higher_and_a_released_term_is_marked(open_session: Callable[..., Session]) -> None:
    session = open_session()
    beat = session.heartbeat([KEY], [KEY])
    assert session.read(KEY).released
    assert session.begin(KEY, beat.timeline, fenced=False) == 1
    assert not session.read(KEY).released
    session.release(KEY, 1)
    assert won(session)
    assert session.read(KEY).released
    assert session.begin(KEY, beat.timeline, fenced=False) == 2


def test_on_a_later_timeline_epochs_are_higher_than_any_of_an_earlier_one(open_session: Callable[..., Session]) -> None:
    session = open_session()
    assert won(session)
    assert session.begin(KEY, 3, fenced=False) == (2 << 32) + 1


def test_no_epoch_begins_without_the_lock(open_session: Callable[..., Session]) -> None:
    assert open_session().begin(KEY, 1, fenced=False) is None


def test_an_older_schema_is_refused(empty_database_url: str) -> None:
    with pytest.raises(SchemaOutdated):
        Session.open(empty_database_url, "i", QUICK, list(LeaseKey), LATEST)


def test_a_forked_child_neither_ends_nor_keeps_the_session(
    open_session: Callable[..., Session], conn: psycopg.Connection
) -> None:
    session = open_session(Timing())
    assert won(session)
    done, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        session._conn.pgconn.finish()  # the worst that a child can do: say goodbye to the server
        os.write(tell, b".")
        signal.pause()
        os._exit(0)
    os.close(tell)
    try:
        assert os.read(done, 1) == b"."
        assert session.heartbeat([KEY], []).seen[KEY].held
        session._conn.pgconn.finish()
        until(lambda: conn.execute(HELD_BY, [KEY]).fetchone() is None, "the lock is free while the child lives")
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- the fenced transaction


def test_a_stale_leader_writes_nothing(
    make_lease: Callable[[str, str], Lease], database_url: str, conn: psycopg.Connection
) -> None:
    conn.execute("create table effect (epoch bigint)")
    stale = make_lease(KEY.role, database_url)
    with stale.transaction() as work:
        work.execute("insert into effect values (%s)", [stale.epoch])
    make_lease(KEY.role, database_url)
    with pytest.raises(LeaseLost), stale.transaction() as work:
        work.execute("insert into effect values (%s)", [stale.epoch])
    assert conn.execute("select epoch from effect").fetchall() == [(1,)]


def test_the_next_epoch_waits_for_a_transaction_in_flight(
    make_lease: Callable[[str, str], Lease], database_url: str, open_session: Callable[..., Session]
) -> None:
    lease = make_lease(KEY.role, database_url)
    session = open_session()
    assert won(session)
    with lease.transaction():
        assert session.begin(KEY, 1, fenced=True) is None
    assert session.begin(KEY, 1, fenced=True) == lease.epoch + 1


def test_a_transaction_that_idles_keeps_no_successor_out(
    make_lease: Callable[[str, str], Lease], database_url: str, open_session: Callable[..., Session]
) -> None:
    lease = make_lease(KEY.role, database_url)
    lease._ttl = 0.3
    session = open_session()
    assert won(session)
    with pytest.raises(psycopg.Error), lease.transaction() as work:
        until(lambda: session.begin(KEY, 1, fenced=True), "the successor's epoch is committed")
        work.execute("select 1")


def test_an_exception_rolls_back(
    make_lease: Callable[[str, str], Lease], database_url: str, conn: psycopg.Connection
) -> None:
    conn.execute("create table effect (epoch bigint)")
    lease = make_lease(KEY.role, database_url)
    with pytest.raises(ZeroDivisionError), lease.transaction() as work:
        work.execute("insert into effect values (1)")
        raise ZeroDivisionError
    assert conn.execute("select count(*) from effect").fetchone() == (0,)


# -- the loop


@dataclass
class Replica:
    """An elector in a thread, with workers that wait until they are told to end."""

    elector: Elector
    thread: threading.Thread
    terms: list[Term] = field(default_factory=list)

    def leads(self) -> bool:
        return any(term.held and not term.ended.is_set() for term in self.terms)


@pytest.fixture
def replica(database_url: str) -> Iterator[Callable[..., Replica]]:
    with running(database_url) as start:
        yield start


@contextmanager
def running(url: str) -> Iterator[Callable[..., Replica]]:
    started: list[Replica] = []

    def start(
        *,
        fenced: bool = False,
        stop_first: bool = False,
        ends: bool = True,
        lingers: threading.Event | None = None,
        timing: Timing = QUICK,
        drain_timeout: float = 0.5,
    ) -> Replica:
        def begin(term: Term) -> None:
            subject.terms.append(term)
            threading.Thread(target=work, args=(term,), daemon=True).start()

        def work(term: Term) -> None:
            while ends and term.wait(60):
                pass
            if lingers is not None:
                lingers.wait(60)
            if ends:
                term.ended.set()
                subject.elector.worker_ended()

        elector = Elector(
            url, f"i{len(started)}", timing, {KEY: fenced}, begin, overrun=overran.append, drain_timeout=drain_timeout,
            schema_version=LATEST,
        )  # fmt: skip
        subject = Replica(elector, threading.Thread(target=elector.run, daemon=True))
        if stop_first:
            elector.stop()
        subject.thread.start()
        started.append(subject)
        return subject

    overran: list[str] = []
    start.overran = overran  # type: ignore[attr-defined]
    yield start
    for subject in started:
        for term in subject.terms:
            term.lose("the test is over")
            term.ended.set()
        subject.elector.stop()
        subject.thread.join(10)
        assert not subject.thread.is_alive()


def test_one_leads_and_hands_over_when_stopped(replica: Callable[..., Replica]) -> None:
    first = replica()
    until(first.leads, "the first leads")
    second = replica()
    until(lambda: second.elector.journal.connection == "open", "the second stands by")
    stopped = time.monotonic()
    first.elector.stop()
    until(second.leads, "the second leads")
    assert time.monotonic() - stopped < 1
    first.thread.join(5)
    assert not first.thread.is_alive()
    assert [term.epoch for term in first.terms + second.terms] == [1, 2]


def test_stop_may_come_first_and_twice(replica: Callable[..., Replica]) -> None:
    subject = replica(stop_first=True)
    subject.elector.stop()
    subject.thread.join(5)
    assert not subject.thread.is_alive()
    assert subject.terms == []


def test_a_terminated_session_ends_the_term_and_the_replica_competes_again(
    replica: Callable[..., Replica], conn: psycopg.Connection
) -> None:
    subject = replica()
    until(subject.leads, "it leads")
    conn.execute("select pg_terminate_backend(pid) from (" + HELD_BY + ") as l", [KEY])
    until(lambda: not subject.terms[0].held, "the term is lost", timeout=1)
    until(subject.leads, "it leads again")
    assert [term.epoch for term in subject.terms] == [1, 2]


def test_a_lock_that_vanished_is_noticed_within_one_interval(replica: Callable[..., Replica]) -> None:
    subject = replica()
    until(subject.leads, "it leads")
    (session,) = [session for session in _open_sessions if session._instance == "i0"]
    session._conn.execute("select pg_advisory_unlock_all()")
    vanished = time.monotonic()
    until(lambda: not subject.terms[0].held, "the term is lost")
    assert time.monotonic() - vanished < QUICK.interval + 0.2
    until(subject.leads, "it leads again")
    assert [term.epoch for term in subject.terms] == [1, 2]


@contextmanager
def about_to_begin(replica: Callable[..., Replica], database_url: str, conn: psycopg.Connection) -> Iterator[Replica]:
    """A replica that has won the lock and whose next epoch is committed only when the context ends."""
    conn.execute("select pg_advisory_lock(%s)", [int(KEY)])
    subject = replica(timing=Timing())
    until(lambda: subject.elector.journal.connection == "open", "it stands by")
    with psycopg.connect(database_url) as blocker:
        blocker.execute("lock table {{ cookiecutter.project_slug }}.lease in share mode")  # readers may, writers wait
        conn.execute("select pg_advisory_unlock(%s)", [int(KEY)])
        until(lambda: conn.execute(WAITING).fetchone(), "the epoch is about to be committed")
        yield subject


@pytest.mark.slow
def test_a_stop_while_the_epoch_is_committed_begins_no_term(
    replica: Callable[..., Replica], database_url: str, conn: psycopg.Connection
) -> None:
    with about_to_begin(replica, database_url, conn) as subject:
        subject.elector.stop()
    subject.thread.join(10)
    assert not subject.thread.is_alive()
    assert subject.terms == []
    row = conn.execute("select epoch, released_at is not null from {{ cookiecutter.project_slug }}.lease").fetchone()
    assert row == (1, True)


@pytest.mark.slow
def test_a_step_down_asked_for_before_a_term_began_does_not_end_it(
    replica: Callable[..., Replica], database_url: str, conn: psycopg.Connection
) -> None:
    with about_to_begin(replica, database_url, conn) as subject:
        conn.execute("select pg_notify(%s, %s)", [CHANNEL, f"step-down {KEY.role}"])
    until(subject.leads, "it leads")
    heartbeat = time.monotonic() + Timing().interval
    until(lambda: time.monotonic() > heartbeat, "one interval went by")
    assert subject.terms[0].reason is None


@pytest.mark.slow
def test_the_lease_is_kept_for_a_worker_that_drains_for_longer_than_the_ttl(
    replica: Callable[..., Replica], conn: psycopg.Connection
) -> None:
    done = threading.Event()
    subject = replica(lingers=done, drain_timeout=60)
    until(subject.leads, "it leads")
    holder = conn.execute(HELD_BY, [KEY]).fetchone()
    subject.elector.stop()
    stopped = time.monotonic()
    while time.monotonic() < stopped + 1.5 * QUICK.ttl:
        assert conn.execute(HELD_BY, [KEY]).fetchone() == holder
        assert subject.terms[0].held
    done.set()
    subject.thread.join(10)
    assert not subject.thread.is_alive()
    assert conn.execute(HELD_BY, [KEY]).fetchone() is None


def test_without_a_session_a_stopping_loop_sees_its_worker_out_and_does_not_spin(
    replica: Callable[..., Replica], conn: psycopg.Connection
) -> None:
    done = threading.Event()
    subject = replica(lingers=done, drain_timeout=60, timing=Timing())
    until(subject.leads, "it leads")
    subject.elector.stop()
    conn.execute("select pg_terminate_backend(pid) from (" + HELD_BY + ") as l", [KEY])
    until(lambda: not subject.terms[0].held, "the term is lost")
    at, busy = time.monotonic(), time.process_time()
    until(lambda: time.monotonic() > at + 0.5, "half a second went by")
    assert subject.thread.is_alive()
    assert time.process_time() - busy < 0.25
    done.set()
    subject.thread.join(10)
    assert not subject.thread.is_alive()


OUTLIVES_ITS_LEASE = """
import sys, threading, time
from {{ cookiecutter.project_slug }}.config import Timing
from {{ cookiecutter.project_slug }}.keys import LeaseKey
from {{ cookiecutter.project_slug }}.lease.elector import Elector

def start(term):
    threading.Thread(target=lambda: (print("leads", file=sys.stderr, flush=True), time.sleep(600)), daemon=True).start()

Elector(sys.argv[1], "i", Timing(0.2, 1.5, 0.5), {next(iter(LeaseKey)): False}, start, print, 600, 1).run()
"""


@pytest.mark.slow
def test_a_process_whose_worker_outlives_its_lease_is_ended(database_url: str, conn: psycopg.Connection) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OUTLIVES_ITS_LEASE, database_url], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == b"leads\n"
            conn.execute("select pg_terminate_backend(pid) from (" + HELD_BY + ") as l", [KEY])
            # by the watchdog, or by a crash while that prints the stacks of running threads
            assert process.wait(QUICK.kill + 1) in (1, -signal.SIGSEGV)
        finally:
            process.kill()


def test_stepping_down_hands_over(replica: Callable[..., Replica], conn: psycopg.Connection) -> None:
    first = replica()
    until(first.leads, "the first leads")
    second = replica()
    until(lambda: second.elector.journal.connection == "open", "the second stands by")
    conn.execute("select pg_notify(%s, %s)", [CHANNEL, f"step-down {KEY.role}"])
    until(second.leads, "the second leads")
    assert not first.leads()


def test_a_worker_that_will_not_end_keeps_its_lease_and_is_reported(
    replica: Callable[..., Replica], conn: psycopg.Connection
) -> None:
    subject = replica(ends=False)
    until(subject.leads, "it leads")
    subject.elector.stop()
    until(lambda: replica.overran, "the overrun is reported")  # type: ignore[attr-defined]
    assert conn.execute(HELD_BY, [KEY]).fetchone() is not None
    assert replica.overran[0] == KEY.role  # type: ignore[attr-defined]


def test_a_database_that_is_away_is_waited_for(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as conn:
        name = conn.info.dbname
    missing = empty_database_url.replace(name, "no_such_database")
    with running(missing) as start:
        subject = start()
        until(lambda: subject.elector.journal.connection == "unreachable", "it says so")
        assert subject.thread.is_alive()


def test_an_older_schema_ends_the_loop_with_a_reason(empty_database_url: str) -> None:
    with running(empty_database_url) as start:
        subject = start()
        subject.thread.join(10)
        assert not subject.thread.is_alive()
        assert isinstance(subject.elector.fatal, SchemaOutdated)


def test_a_lock_of_another_program_is_reported_as_a_collision(
    replica: Callable[..., Replica], database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(psycopg.connect(database_url, autocommit=True, application_name="billing2 x")) as other:
        other.execute("select pg_advisory_lock(%s)", [int(KEY)])
        subject = replica()
        shown = ""

        def reported() -> bool:
            nonlocal shown
            shown += capsys.readouterr().out
            return "lease.collision" in shown

        until(reported, "the collision is logged")
        assert "billing2 x" in shown
        assert not subject.leads()


# -- what it tells


@pytest.mark.slow
def test_each_end_of_a_term_is_counted_once_with_its_reason(
    replica: Callable[..., Replica], conn: psycopg.Connection
) -> None:
    subject = replica()
    counted: Counter[tuple[str, str]] = Counter(dict.fromkeys(subject.elector.journal.transitions, 0))

    def ends(reason: str) -> None:
        counted[KEY.role, ACQUIRED] += 1
        counted[KEY.role, reason] += 1
        until(lambda: subject.elector.journal.transitions == counted, f"counted: {reason}")

    until(subject.leads, "it leads")
    subject.terms[0].ended.set()
    subject.elector.worker_ended()
    ends(WORKER_ENDED)
    until(subject.leads, "it leads again")
    conn.execute("select pg_notify(%s, %s)", [CHANNEL, f"step-down {KEY.role}"])
    ends(STEPPED_DOWN)
    until(subject.leads, "it leads again")
    conn.execute("select pg_terminate_backend(pid) from (" + HELD_BY + ") as l", [KEY])
    until(lambda: subject.elector.journal.transitions[KEY.role, SESSION_ENDED] == 1, "the loss is counted")
    counted.update({(KEY.role, ACQUIRED): 1, (KEY.role, SESSION_ENDED): 1})
    until(subject.leads, "it leads again")
    subject.elector.stop()
    ends(STOPPING)


def test_a_term_that_expires_is_counted_once_though_its_session_lives(replica: Callable[..., Replica]) -> None:
    subject = replica()
    until(subject.leads, "it leads")
    subject.terms[0]._deadline = 0.0
    transitions = subject.elector.journal.transitions
    until(lambda: transitions[KEY.role, ACQUIRED] == 2, "it leads again")
    assert {reason: count for (_, reason), count in transitions.items() if count} == {ACQUIRED: 2, EXPIRED: 1}


def test_a_stand_by_remembers_the_takeovers_that_it_saw(replica: Callable[..., Replica]) -> None:
    first = replica()
    until(first.leads, "the first leads")
    second = replica()
    until(lambda: second.elector.journal._holders, "the second has seen it")
    assert list(second.elector.journal.takeovers) == []
    first.elector.stop()
    until(second.leads, "the second leads")
    third = replica()
    until(lambda: third.elector.journal._holders, "the third has seen it")
    second.terms[0].ended.set()
    second.elector.worker_ended()
    until(third.leads, "the third leads")
    until(lambda: len(second.elector.journal.takeovers) == 2, "the second has seen that")
    assert [(t.role, t.epoch, t.holder) for t in second.elector.journal.takeovers] == [
        (KEY.role, 2, "i1"),
        (KEY.role, 3, "i2"),
    ]


def test_its_facts_are_those_of_the_moment(replica: Callable[..., Replica], conn: psycopg.Connection) -> None:
    conn.execute("select pg_advisory_lock(%s)", [int(KEY)])
    subject = replica()
    journal = subject.elector.journal
    until(lambda: journal.collisions[KEY.role] is not None, "the collision is known")
    (idle,) = subject.elector.facts()
    assert (idle.phase, idle.leads, idle.epoch, idle.progress_age_seconds) == ("standby", False, 0, None)
    conn.execute("select pg_advisory_unlock(%s)", [int(KEY)])
    until(subject.leads, "it leads")
    assert journal.collisions[KEY.role] is None
    (leading,) = subject.elector.facts()
    assert (leading.phase, leading.leads, leading.epoch, leading.overdue_seconds) == ("leading", True, 1, 0.0)
    assert leading.progress_age_seconds is not None
    heartbeats = sum(journal.heartbeats)
    until(lambda: sum(journal.heartbeats) > heartbeats, "another heartbeat is counted")
    assert journal.heartbeat_seconds > 0


# -- the worker's connections


def test_a_term_does_not_meet_connections_that_broke_under_an_earlier_one(
    database_url: str, conn: psycopg.Connection
) -> None:
    worked: list[tuple[int, float]] = []

    def work(lease: Lease) -> None:
        with ExitStack() as stack:
            for _ in range(4):  # as many connections at once
                stack.enter_context(lease.transaction())
        worked.append((lease.epoch, time.monotonic()))
        while lease.wait(60):
            pass

    subject = Supervisor(
        Settings(database_url=SecretStr(database_url), interval_seconds=0.2, ttl_seconds=1.5, stop_grace_seconds=0.5),
        {KEY.role: Worker(work, effects="fenced")},
    )
    thread = threading.Thread(target=subject.run, args=(StopSignals(),), daemon=True)
    thread.start()
    try:
        until(lambda: worked, "the first term works")
        at = time.monotonic()
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        until(lambda: len(worked) > 1, "the next one works")
        assert worked[1][0] > worked[0][0]
        assert worked[1][1] - at < 1, "a pool waits a second after the second dead connection that it meets"
    finally:
        subject.stop()
        thread.join(20)
    assert not thread.is_alive()
