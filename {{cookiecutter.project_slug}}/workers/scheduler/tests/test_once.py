"""`job run`, and processes that are killed in the middle of a job."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from {{cookiecutter.project_slug}} import Lease, ledger
from {{cookiecutter.project_slug}}.cli import main
from {{cookiecutter.project_slug}}.exclusive import Misuse
from {{cookiecutter.project_slug}}_scheduler import once
from {{cookiecutter.project_slug}}_scheduler.job import JOBS, Run, job
from {{cookiecutter.project_slug}}_scheduler.once import run_job

SERVICE = "{{cookiecutter.project_slug}}"
PREFIX = f"{SERVICE.upper()}_"
HOUR = timedelta(hours=1)

# The real command with two jobs of ours, whose first attempt comes to no end by itself.
COMMAND = """
import sys, threading
from {{cookiecutter.project_slug}} import cli
from {{cookiecutter.project_slug}}_scheduler.job import JOBS, job

JOBS.clear()

@job("invoices", every="1h")
def invoices(conn, run):
    conn.execute("insert into public.effect (name) values ('invoice')")
    print("begun", flush=True)
    if "hang" in conn.execute("select note from public.note").fetchone():
        conn.execute("select pg_sleep(600)")

@job("mailing", every="1h", transactional=False)
def mailing(run):
    with run.transaction() as conn:
        conn.execute("insert into public.effect (name) values (%s)", [f"mail {run.attempt}"])
    print("begun", flush=True)
    if run.attempt == 1:
        threading.Event().wait()

sys.exit(cli.main())
"""

Start = Callable[..., "subprocess.Popen[str]"]
Effect = Callable[[], list[str]]
Machine = Callable[[str], ledger.Outside]


@pytest.fixture(autouse=True)
def _no_jobs() -> Iterator[None]:
    declared = dict(JOBS)
    JOBS.clear()
    yield
    JOBS.clear()
    JOBS.update(declared)


@pytest.fixture
def effect(conn: psycopg.Connection) -> Effect:
    conn.execute("create table public.effect (name text); create table public.note as select ''::text as note")
    return lambda: sorted(name for (name,) in conn.execute("select name from public.effect"))


@pytest.fixture
def machine(database_url: str) -> Iterator[Machine]:
    """A machine that runs jobs, by its name."""
    opened: list[psycopg.Connection] = []

    def connect(name: str) -> psycopg.Connection:
        opened.append(psycopg.connect(database_url, autocommit=True, application_name=name))
        return opened[-1]

    yield lambda name: ledger.Outside(connect(""), connect(f"{SERVICE} {name}"), name)
    for connection in opened:
        connection.close()


@pytest.fixture
def start(tmp_path: Path, database_url: str) -> Iterator[Start]:
    """Starts the command with the jobs above; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []
    timing = {"INTERVAL_SECONDS": "0.2", "TTL_SECONDS": "3", "STOP_GRACE_SECONDS": "1", "OPS_LISTEN": "off"}
    ours = {f"{PREFIX}{name}": value for name, value in {**timing, "DATABASE_URL": database_url}.items()}

    def one(*arguments: str, **more: str) -> "subprocess.Popen[str]":
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            cwd=tmp_path,
            env=kept | ours | {f"{PREFIX}{name}": value for name, value in more.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begun(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"


def hour(conn: psycopg.Connection) -> datetime:
    return ledger.now(conn).replace(minute=0, second=0, microsecond=0)


def states(conn: psycopg.Connection) -> list[tuple[str, int]]:
    return [(past.state, past.attempt) for name in ("invoices", "mailing") for past in ledger.history(conn, name)]


# -- killed between claim and finish


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "effects", "attempt"), [("invoices", ["invoice"], 1), ("mailing", ["mail 1", "mail 2"], 2)]
)
def test_a_job_whose_leader_is_killed_in_the_middle_is_run_by_the_next(
    conn: psycopg.Connection, start: Start, effect: Effect, name: str, effects: list[str], attempt: int
) -> None:
    conn.execute("update public.note set note = 'hang'")
    for known in ("invoices", "mailing"):  # due is the one of the two that was not run this hour
        ledger.skip(conn, known, hour(conn) - (HOUR if known == name else timedelta()))
    leader = start("run", SCHEDULER_ENABLED="true")
    begun(leader)
    conn.execute("update public.note set note = ''")
    start("run", SCHEDULER_ENABLED="true")
    leader.kill()
    wait_until(lambda: ledger.history(conn, name)[0].state == "succeeded")
    past = ledger.history(conn, name)[0]
    assert (past.period, past.attempt) == (ledger.last_periods(conn, [name])[name], attempt)
    assert effect() == effects


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "effects", "attempt"), [("invoices", ["invoice"], 1), ("mailing", ["mail 1", "mail 2"], 2)]
)
def test_a_job_run_from_outside_and_killed_in_the_middle_is_run_by_whoever_comes_next(
    conn: psycopg.Connection, start: Start, effect: Effect, name: str, effects: list[str], attempt: int
) -> None:
    conn.execute("update public.note set note = 'hang'")
    first = start("job", "run", name)
    begun(first)
    loser = start("job", "run", name)
    out, _ = loser.communicate(timeout=60)
    assert loser.returncode == 0
    assert f"{name} is being run by {first.pid}-" in out
    conn.execute("update public.note set note = ''")
    first.kill()
    sessions = f"select from pg_stat_activity where application_name like '{SERVICE} {first.pid}-%'"
    wait_until(lambda: conn.execute(sessions).fetchall() == [])
    second = start("job", "run", name)
    out, _ = second.communicate(timeout=60)
    assert (second.returncode, "was run here" in out) == (0, True)
    assert effect() == effects
    assert states(conn) == [("succeeded", attempt)]


@pytest.mark.slow
def test_on_any_number_of_machines_one_wins_and_the_others_say_who(
    conn: psycopg.Connection, start: Start, effect: Effect
) -> None:
    machines = [start("job", "run", "invoices") for _ in range(3)]
    said = [machine.communicate(timeout=60)[0].splitlines()[-1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0] * 3
    (winner,) = [machine for machine, line in zip(machines, said, strict=True) if "was run here" in line]
    assert all(f"by {winner.pid}-" in line for line in said), said
    assert effect() == ["invoice"]


@pytest.mark.slow
def test_bad_input_is_a_configuration_error(start: Start) -> None:
    assert start("job", "run", "invoicse").wait(60) == 78


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["job", "run", "--help"])
    assert "job run invoices" in capsys.readouterr().out.partition("example:")[2]


# -- one machine, in this process


def test_it_runs_the_latest_planned_time_and_no_other_machine_does_so_again(
    conn: psycopg.Connection, machine: Machine
) -> None:
    ran: list[Run] = []
    job("invoices", every="1h")(lambda conn, run: ran.append(run))
    done, said = run_job(machine("one"), "invoices", None, False)
    assert (done, said) == (True, f"invoices for {ran[0].period.isoformat()} was run here, by one")
    done, said = run_job(machine("two"), "invoices", None, False)
    assert done
    assert said.startswith(f"invoices for {ran[0].period.isoformat()} was run by one, which finished at ")
    assert len(ran) == 1
    (status,) = ledger.last_runs(conn)
    assert (status.schedule, status.next_period) == ("every 1h", ran[0].period + HOUR)


@pytest.mark.slow
def test_a_clock_that_is_a_little_ahead_waits_for_the_planned_time(
    conn: psycopg.Connection, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Run] = []
    job("often", every="1s")(lambda conn, run: ran.append(run))
    before = ledger.now(conn)
    assert run_job(machine("one"), "often", None, False)[0]
    assert ran[0].period > before
    monkeypatch.setattr(once, "EARLY_SECONDS", 0)
    run_job(machine("one"), "often", None, False)
    assert ran[-1].period <= ledger.now(conn)


def test_a_period_given_is_run_if_it_is_a_planned_one(conn: psycopg.Connection, machine: Machine) -> None:
    ran: list[Run] = []
    job("invoices", every="1h")(lambda conn, run: ran.append(run))
    wanted = hour(conn) - 30 * HOUR
    assert run_job(machine("one"), "invoices", wanted.replace(tzinfo=None), False)[0]
    assert [run.period for run in ran] == [wanted]
    with pytest.raises(ledger.Refused, match=rf"no planned time of job 'invoices' \(every 1h\); .* {wanted:%FT%T}"):
        run_job(machine("one"), "invoices", wanted + timedelta(minutes=1), False)
    with pytest.raises(ledger.Refused, match="still to come"):
        run_job(machine("one"), "invoices", hour(conn) + HOUR, True)
    with pytest.raises(ledger.Refused, match=r"there is no job 'invoicse': did you mean invoices\?"):
        run_job(machine("one"), "invoicse", None, False)


@pytest.mark.parametrize("transactional", [True, False])
def test_it_sees_the_attempts_through_and_what_has_failed_is_run_again_only_by_force(
    conn: psycopg.Connection, machine: Machine, monkeypatch: pytest.MonkeyPatch, transactional: bool
) -> None:
    monkeypatch.setattr("{{cookiecutter.project_slug}}.ledger.runs.FIRST_RETRY_SECONDS", 0.1)
    ran: list[Run] = []

    def work(run: Run) -> None:
        ran.append(run)
        if len(ran) < 4:
            raise RuntimeError("no paper")

    if transactional:
        job("invoices", every="1h")(lambda conn, run: work(run))
    else:
        job("invoices", every="1h", transactional=False)(work)
    done, said = run_job(machine("one"), "invoices", None, False)
    assert (done, len(ran)) == (False, 3)
    assert "has failed: no paper; to run it all the same: --force" in said
    done, said = run_job(machine("two"), "invoices", None, False)
    assert (done, len(ran)) == (False, 3)
    assert "failed after 3 attempts, the last by one: RuntimeError: no paper" in said
    assert run_job(machine("two"), "invoices", None, True) == (
        True,
        said.partition(" failed")[0] + " was run here, by two",
    )
    assert states(conn) == [("succeeded", 4)]


def test_an_attempt_that_another_machine_left_for_later_is_waited_for(
    conn: psycopg.Connection, machine: Machine
) -> None:
    ran: list[Run] = []
    job("invoices", every="1h")(lambda conn, run: ran.append(run))
    first = machine("one")
    claimed = ledger.start(first.work, "invoices", hour(conn), first)
    assert claimed
    ledger.fail(first.work, claimed, "no paper", retry_in=timedelta(seconds=0.5))
    assert run_job(machine("two"), "invoices", hour(conn), False)[0]
    assert [run.attempt for run in ran] == [2]


def test_a_leader_at_work_holds_it_back_and_is_named(
    conn: psycopg.Connection, machine: Machine, make_lease: Callable[[str, str], Lease], database_url: str
) -> None:
    job("mailing", every="1h", transactional=False)(lambda run: pytest.fail("ran"))
    job("invoices", every="1h")(lambda conn, run: pytest.fail("ran"))
    lease = make_lease("scheduler", database_url)
    conn.execute(f"update {SERVICE}.lease set holder = 'the-leader'")
    assert ledger.start(conn, "mailing", hour(conn), lease)
    assert run_job(machine("one"), "mailing", None, False) == (True, "mailing is being run by test")
    with lease.transaction() as other:
        assert other.execute("select pg_try_advisory_xact_lock(%s)", [ledger.lock_key("invoices")]).fetchone() == (
            True,
        )
        assert run_job(machine("one"), "invoices", None, False) == (True, "invoices is being run by the-leader")


def test_a_run_that_lost_its_session_ends_and_says_so(conn: psycopg.Connection, machine: Machine) -> None:
    outside = machine("one")

    @job("mailing", every="1h", transactional=False)
    def mailing(run: Run) -> None:
        conn.execute("select pg_terminate_backend(%s)", [outside.session.info.backend_pid])
        run.check()
        pytest.fail("went on")

    done, said = run_job(outside, "mailing", None, False)
    assert not done
    assert "was not finished: the session that holds the job is gone" in said
    assert states(conn) == [("running", 1)]


def test_a_session_that_cannot_carry_a_lock_is_refused(database_url: str) -> None:
    job("invoices", every="1h")(lambda conn, run: None)
    with (
        psycopg.connect(database_url, autocommit=True) as work,
        psycopg.connect(database_url) as session,
        pytest.raises(Misuse, match="autocommit"),
    ):
        run_job(ledger.Outside(work, session, "one"), "invoices", None, False)
