"""The command as it is typed: exit codes, answers on standard output, complaints on standard error."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from {{cookiecutter.project_slug}} import ledger
from {{cookiecutter.project_slug}}.cli import main
from {{cookiecutter.project_slug}}.keys import DISTRIBUTION, ENV_PREFIX, SERVICE, LeaseKey
from {{cookiecutter.project_slug}}.schema import LATEST

pytestmark = pytest.mark.slow  # each test starts processes

COMMANDS = [
    "run",
    "workers",
    "keys",
    "migrate",
    "status",
    "doctor",
    "verify",
    "step-down",
    "job",
    "job list",
    "job history",
    "dev",
    "new-worker",
]
ROLE = next(iter(LeaseKey)).role
NOWHERE = "postgresql://u:hunter2@127.0.0.1:1/d"

Start = Callable[..., "subprocess.Popen[str]"]


def environment(url: str | None = None, **more: str) -> dict[str, str]:
    # COLUMNS: tables are cut at the width of a terminal
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith((ENV_PREFIX, "COLUMNS"))}
    ours = {f"{ENV_PREFIX}{name}": value for name, value in more.items()}
    return kept | ({f"{ENV_PREFIX}DATABASE_URL": url} if url else {}) | ours | {"PYTHONUNBUFFERED": "1"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the command in an empty directory; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def one(*arguments: str, url: str | None = None, **more: str) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", SERVICE, *arguments],
                cwd=tmp_path,
                env=environment(url, **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start: Start) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    def one(*arguments: str, url: str | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
        process = start(*arguments, url=url, **more)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return one


Run = Callable[..., "subprocess.CompletedProcess[str]"]


# -- help


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(rf"{DISTRIBUTION} \d+\.\d+\.\d+\n", helped(capsys, "--version"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{DISTRIBUTION} {command}" in helped(capsys, *command.split(), "--help").partition("example:")[2]


def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = helped(capsys, "--help")
    assert [
        name for name in {c.split()[0] for c in COMMANDS} if not re.search(rf"^    {name}\b", listed, re.MULTILINE)
    ] == []


# -- run


def test_everything_that_is_wrong_with_the_configuration_is_told_at_once(run: Run) -> None:
    done = run("run", TTL_SECOND="9", POLER_ENABLED="true", ZZZ_ENABLED="maybe")
    assert done.returncode == 78
    assert done.stdout == ""
    assert [line.startswith(f"{DISTRIBUTION}: ") for line in done.stderr.splitlines()] == [True, True, True]


def test_without_a_database_run_names_the_setting(run: Run) -> None:
    done = run("run")
    assert done.returncode == 78
    assert f"set {ENV_PREFIX}DATABASE_URL=" in done.stderr


def test_nothing_slow_is_imported_before_signals_are_heard() -> None:
    """In a container a SIGTERM that comes earlier is lost, see __main__.py."""
    code = f"import sys; import {SERVICE}.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith((SERVICE, "psycopg", "pydantic", "structlog"))}
    assert loaded == {SERVICE, f"{SERVICE}.__main__"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_with_every_gate_shut_a_replica_stays_up_and_stops_when_asked(number: int, start: Start) -> None:
    process = start("run", url=NOWHERE, OPS_LISTEN="off")
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(json.loads(line))
        if seen[-1]["event"] == "service.idle":
            break
    process.send_signal(number)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert {line["role"] for line in seen if line["event"].startswith("gate.")} == {key.role for key in LeaseKey}
    assert all(line.get("hint") for line in seen)


# -- answers without a database


def test_workers_shows_every_worker_and_needs_no_database(run: Run) -> None:
    done = run("workers")
    assert done.returncode == 0, done.stderr
    for key in LeaseKey:
        assert re.search(rf"^{key.role} +(yes|no) +unset +(off|absent)$", done.stdout, re.MULTILINE)


def test_workers_fails_where_run_would_refuse(run: Run) -> None:
    done = run("workers", ZZZ_ENABLED="true")
    assert done.returncode == 78
    assert re.search(r"^zzz +no +true +refused$", done.stdout, re.MULTILINE)


def test_keys_shows_every_key(run: Run) -> None:
    done = run("keys")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [[k.role, str(k.value)] for k in LeaseKey]


# -- one-shot commands


@pytest.mark.parametrize("command", [["status"], ["migrate"], ["verify"], ["step-down", ROLE]])
def test_an_unreachable_database_is_exit_75_with_its_place_and_without_its_password(
    command: list[str], run: Run
) -> None:
    done = run(*command, url=NOWHERE)
    assert done.returncode == 75
    assert "127.0.0.1:1/d" in done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["status"], ["step-down", ROLE]])
def test_before_migrating_a_command_says_so(command: list[str], run: Run, empty_database_url: str) -> None:
    done = run(*command, url=empty_database_url)
    assert done.returncode == 78
    assert f"run: {DISTRIBUTION} migrate" in done.stderr


def test_migrate_says_what_it_applied(run: Run, empty_database_url: str) -> None:
    first, second = run("migrate", url=empty_database_url), run("migrate", url=empty_database_url)
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout.startswith("applied 0001_lease\n")
    assert second.stdout == f"the schema {SERVICE} is at version {LATEST}, nothing to apply\n"


def test_status_for_machines_has_stable_names_with_units(run: Run, database_url: str) -> None:
    report = json.loads(run("status", "--json", url=database_url).stdout)
    assert list(report) == ["service", "checked_at", "roles"]
    assert [role["role"] for role in report["roles"]] == [key.role for key in LeaseKey]
    assert list(report["roles"][0]) == [
        "role",
        "key",
        "state",
        "holder",
        "holder_pid",
        "client_address",
        "epoch",
        "leading_since",
        "leading_seconds",
        "heartbeat_age_seconds",
        "last_end",
        "standbys",
    ]


def test_watching_refreshes_until_ctrl_c(start: Start, database_url: str) -> None:
    process = start("status", "--watch", "--json", url=database_url)
    assert process.stdout is not None
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    assert first["checked_at"] < second["checked_at"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_watching_survives_a_lost_connection(start: Start, conn: psycopg.Connection, database_url: str) -> None:
    process = start("status", "--watch", "--json", url=database_url)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", [f"{SERVICE}.cli"]
    )
    assert "no answer" in process.stderr.readline()
    while "service" not in process.stdout.readline():
        assert process.poll() is None


def test_a_reader_that_has_gone_is_no_error(start: Start, database_url: str) -> None:
    process = start("status", "--watch", url=database_url)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) != 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_doctor_fails_when_something_fails(run: Run, database_url: str, empty_database_url: str) -> None:
    good, bad = run("doctor", url=database_url), run("doctor", "--json", url=empty_database_url)
    assert good.returncode == 0, good.stdout
    assert bad.returncode == 1
    failed = {check["name"] for check in json.loads(bad.stdout) if check["result"] == "fail"}
    # some workers look for their tables too
    assert failed - {"worker set-up"} == {"schema", "lease keys"}


def test_verify_says_what_it_saw_and_fails_before_migrating(
    run: Run, database_url: str, empty_database_url: str
) -> None:
    quick = {"INTERVAL_SECONDS": "0.2", "TTL_SECONDS": "3", "STOP_GRACE_SECONDS": "1"}
    good, machine = run("verify", url=database_url, **quick), run("verify", "--json", url=database_url, **quick)
    assert (good.returncode, good.stderr) == (0, "")
    assert [line[:4] for line in good.stdout.splitlines()] == ["ok  "] * 3
    assert [check["result"] for check in json.loads(machine.stdout)] == ["ok"] * 3
    bad = run("verify", url=empty_database_url)
    assert bad.returncode == 78
    assert f"run: {DISTRIBUTION} migrate" in bad.stderr


# -- step-down


def test_an_unknown_role_is_refused_with_the_nearest_one(run: Run) -> None:
    done = run("step-down", f"{ROLE}x", url=NOWHERE)
    assert done.returncode == 78
    assert f"did you mean {ROLE}?" in done.stderr


def test_where_nobody_leads_there_is_nobody_to_step_down(run: Run, database_url: str) -> None:
    done = run("step-down", ROLE, url=database_url)
    assert (done.returncode, done.stdout) == (1, f"nobody leads {ROLE}\n")


def leader(run: Run, url: str) -> str | None:
    role: dict[str, Any] = json.loads(run("status", "--json", url=url).stdout)["roles"][0]
    return role["holder"] if role["state"] == "leading" else None


def installed(run: Run) -> bool:
    return re.search(rf"^{ROLE} +yes", run("workers").stdout, re.MULTILINE) is not None


def test_a_leader_steps_down_for_another_replica_or_leads_again(run: Run, start: Start, database_url: str) -> None:
    if not installed(run):
        pytest.skip(f"the extra {ROLE} is not installed")
    on = {f"{ROLE.upper()}_ENABLED": "true", "INTERVAL_SECONDS": "0.2", "TTL_SECONDS": "3", "STOP_GRACE_SECONDS": "1"}
    on["OPS_LISTEN"] = "127.0.0.1:0"
    start("run", url=database_url, **on)
    deadline = time.monotonic() + 30
    while (first := leader(run, database_url)) is None:
        assert time.monotonic() < deadline

    alone = run("step-down", ROLE, url=database_url)
    assert alone.returncode == 1
    assert f"nobody else took over {ROLE}: {first} leads it again" in alone.stdout

    second = start("run", url=database_url, **on)
    assert second.stderr is not None
    for line in second.stderr:
        if json.loads(line)["event"] == "lease.standby":
            break
    done = run("step-down", ROLE, url=database_url)
    assert done.returncode == 0, done.stdout
    assert re.match(
        rf"{ROLE} is led by {second.pid}-\S+ \(epoch 3\), \d+\.\d s after {re.escape(first)} was asked", done.stdout
    )


# -- jobs


def test_what_has_run_is_shown_and_an_unknown_job_is_told_with_the_nearest(
    run: Run, conn: psycopg.Connection, database_url: str
) -> None:
    empty = run("job", "list", url=database_url)
    assert (empty.returncode, empty.stdout) == (0, "no job is declared, and none has run\n")
    hour = ledger.now(conn).replace(minute=0, second=0, microsecond=0)
    assert ledger.claim(conn, "invoices", hour)
    ledger.plan(conn, ROLE, {"invoices": ("every 1h", hour)})
    listed = run("job", "list", url=database_url).stdout.splitlines()
    assert re.match(
        rf"invoices +succeeded +{hour:%FT%TZ} +\d+s ago +{hour:%FT%TZ} \(overdue .*\) +1 +every 1h +-$", listed[1]
    )
    assert [job["job"] for job in json.loads(run("job", "list", "--json", url=database_url).stdout)] == ["invoices"]
    told = run("job", "history", "invoices", "--limit", "5", url=database_url).stdout.splitlines()
    assert re.match(rf"{hour:%FT%TZ} +succeeded +1 ", told[1])
    (past,) = json.loads(run("job", "history", "invoices", "--json", url=database_url).stdout)
    assert (past["state"], past["period"]) == ("succeeded", hour.isoformat())
    unknown = run("job", "history", "invoicse", url=database_url)
    assert unknown.returncode == 78
    assert "did you mean invoices?" in unknown.stderr
