"""Every row of the table of the two gates, with the real command of an installed project."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import Bake, Uv
from laboratory.environment import clean_environment
from laboratory.servers import Postgres, embedded_binaries, room_for_servers

pytestmark = pytest.mark.slow

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
IMPORTED = "the poller was imported\\n"
TOGGLE = "ACME_BILLING_POLLER_ENABLED"


@pytest.fixture(scope="module")
def without_extra(bake: Bake, uv: Uv) -> Path:
    project = bake()
    uv("sync", "--no-dev", cwd=project)
    return project


@pytest.fixture(scope="module")
def with_extra(bake: Bake, uv: Uv) -> Path:
    project = bake()
    module = project / "workers/poller/src/acme_billing_poller/__init__.py"
    module.write_text(f"{module.read_text()}\nimport sys\n\nsys.stderr.write('{IMPORTED}')\n")
    uv("sync", "--no-dev", "--extra", "poller", cwd=project)
    return project


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    with room_for_servers() as directory:
        server = Postgres(directory / "postgres", embedded_binaries()).start()
        try:
            yield server.url()
        finally:
            server.stop()


class Run:
    """One `acme-billing run`: its log line by line, and what else it said on standard error."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self.said = ""

    def read_until(self, event: str) -> dict[str, Any]:
        """The next log line of that event."""
        while (line := self._line()) is not None:
            if line.get("event") == event:
                return line
        raise AssertionError(f"ended with {self.process.wait()} and without {event}: {self.events} {self.said}")

    def end(self, number: int | None = None) -> int:
        """Its exit code, after everything that it said was read."""
        if number is not None:
            self.process.send_signal(number)
        while self._line() is not None:
            pass
        return self.process.wait(30)

    def _line(self) -> dict[str, Any] | None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.events.append(json.loads(line))
                return self.events[-1]
            self.said += line
        return None


@contextmanager
def running(project: Path, url: str = NOWHERE, **toggles: str) -> Iterator[Run]:
    kept = {name: value for name, value in clean_environment().items() if not name.startswith("ACME_BILLING_")}
    process = subprocess.Popen(
        [project / ".venv/bin/acme-billing", "run"],
        cwd=project,
        env=kept | {"ACME_BILLING_DATABASE_URL": url} | toggles,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    too_long = threading.Timer(30, process.kill)  # it would be read from for ever
    too_long.start()
    try:
        yield Run(process)
    finally:
        too_long.cancel()
        process.kill()
        process.communicate()


def refusal(project: Path, **toggles: str) -> str:
    """What `run` says when it refuses to start; nothing but complaints is written."""
    with running(project, **toggles) as run:
        assert run.end() == 78
        assert run.events == []
        assert "Traceback" not in run.said
        return run.said


def given(value: str | None) -> dict[str, str]:
    return {} if value is None else {TOGGLE: value}


@pytest.mark.parametrize("value", [None, "", "false"])
def test_not_installed_and_off_is_absent(without_extra: Path, value: str | None) -> None:
    with running(without_extra, **given(value)) as run:
        run.read_until("service.idle")
        assert run.end(signal.SIGTERM) == 0
        assert run.said == ""


@pytest.mark.parametrize("value", [None, "", "0", "off", "False"])
def test_installed_and_off_is_not_imported_and_says_so_in_one_line(with_extra: Path, value: str | None) -> None:
    with running(with_extra, **given(value)) as run:
        run.read_until("service.idle")
        assert run.end(signal.SIGTERM) == 0
    assert run.said == ""
    lines = [line for line in run.events if line.get("role") == "poller"]
    assert [line["event"] for line in lines] == ["gate.off"]
    assert TOGGLE in lines[0]["hint"]


@pytest.mark.parametrize("value", ["1", "true", "on", "Yes"])
def test_installed_and_on_competes_for_its_lease(with_extra: Path, value: str, database_url: str) -> None:
    environment = os.environ | {"ACME_BILLING_DATABASE_URL": database_url}
    subprocess.run(
        [with_extra / ".venv/bin/acme-billing", "migrate"], cwd=with_extra, env=environment, check=True, timeout=60
    )
    with running(with_extra, database_url, **given(value)) as run:
        assert run.read_until("lease.acquired")["role"] == "poller"
        run.read_until("worker.started")
        assert run.end(signal.SIGTERM) == 0
    assert run.said == "the poller was imported\n"


def test_not_installed_and_on_refuses_with_the_command_that_installs_it(bake: Bake, uv: Uv) -> None:
    project = bake()
    uv("sync", "--no-dev", cwd=project)
    said = refusal(project, **given("true"))
    assert "pip install 'acme-billing[poller]'" in said
    command = re.search(r"uv (sync --extra \S+?),? ", said)
    assert command is not None
    uv(*command[1].split(), "--no-dev", cwd=project)
    with running(project, **given("true")) as run:
        assert run.read_until("service.started")["roles"] == ["poller"]


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("raise RuntimeError('no queue')", "RuntimeError: no queue"),
        ("this is no Python", "SyntaxError"),
    ],
)
def test_installed_and_on_and_not_importable_refuses_with_the_cause(bake: Bake, uv: Uv, code: str, cause: str) -> None:
    project = bake()
    module = project / "workers/poller/src/acme_billing_poller/__init__.py"
    module.write_text(f"{code}\n")
    uv("sync", "--no-dev", "--extra", "poller", cwd=project)
    said = refusal(project, **given("true"))
    assert cause in said
    assert str(module) in said
    with running(project, **given("false")) as run:
        run.read_until("service.idle")


@pytest.mark.parametrize("which", ["without_extra", "with_extra"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ACME_BILLING_POLER_ENABLED", TOGGLE),
        ("ACME_BILLING_POLLER_ENABLE", TOGGLE),
        ("ACME_BILLING_SHEDULER_ENABLED", "ACME_BILLING_SCHEDULER_ENABLED"),
        ("acme_billing_reconcilers_enabled", "ACME_BILLING_RECONCILER_ENABLED"),
    ],
)
def test_an_unknown_name_refuses_and_suggests_the_nearest(
    which: str, name: str, meant: str, request: pytest.FixtureRequest
) -> None:
    said = refusal(request.getfixturevalue(which), **{name: "false"})
    assert f"did you mean {meant}?" in said


@pytest.mark.parametrize("which", ["without_extra", "with_extra"])
@pytest.mark.parametrize("value", ["maybe", "2", "tru"])
def test_a_value_that_is_no_boolean_refuses(which: str, value: str, request: pytest.FixtureRequest) -> None:
    assert f"{TOGGLE} is '{value}', which is no boolean" in refusal(request.getfixturevalue(which), **given(value))


def test_every_problem_is_told_at_once(without_extra: Path) -> None:
    said = refusal(
        without_extra,
        ACME_BILLING_POLLER_ENABLED="true",
        ACME_BILLING_SCHEDULER_ENABLED="maybe",
        ACME_BILLING_RECONSILER_ENABLED="true",
        ACME_BILLING_TTL_SECONDS="soon",
    )
    for name in ("POLLER_ENABLED", "SCHEDULER_ENABLED", "RECONSILER_ENABLED", "TTL_SECONDS"):
        assert said.count(f"acme-billing: ACME_BILLING_{name}") == 1


def test_an_entry_point_of_a_stranger_is_not_imported(bake: Bake, uv: Uv) -> None:
    project = bake()
    uv("sync", "--no-dev", cwd=project)
    (site,) = project.glob(".venv/lib/python*/site-packages")
    (site / "stranger.py").write_text("raise SystemExit('imported')\n")
    info = site / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[acme_billing.workers]\npoller = stranger:worker\n")
    said = refusal(project, **given("true"))
    assert "of the package stranger, not of acme-billing-poller" in said
