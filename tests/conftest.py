"""Fixtures of all tests: generating projects as a person does, and running tools in them.

A test says what machine it needs with `@pytest.mark.needs("root", "pgbouncer")`. It skips with a reason where something
is missing, and fails instead with CI=true where `.ci/run` installs that, since a test that never runs proves nothing.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from uv import find_uv_bin

from laboratory.environment import clean_environment
from laboratory.servers import Postgres, room_for_servers, system_binaries

# A shell starts what it runs in the background with Ctrl-C ignored, and everything that we start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TEMPLATE = Path(__file__).resolve().parents[1]


class Cookiecutter(Protocol):
    """Runs the command with its own home and no user configuration; answers are `key=value` overrides."""

    def __call__(
        self, *arguments: str | Path, cwd: Path, typed: str | None = None
    ) -> subprocess.CompletedProcess[str]: ...


class Bake(Protocol):
    """Generates a fresh project without asking and returns its directory."""

    def __call__(self, **answers: str) -> Path: ...


class Uv(Protocol):
    """Runs uv in a directory, and fails the test with its output where it does not exit 0."""

    def __call__(self, *arguments: str | Path, cwd: Path, **environment: str) -> str: ...


@pytest.fixture(scope="session")
def cookiecutter(tmp_path_factory: pytest.TempPathFactory) -> Cookiecutter:
    home = tmp_path_factory.mktemp("cookiecutter")
    config = home / "config.yaml"
    config.write_text(f"replay_dir: {home / 'replay'}\ncookiecutters_dir: {home / 'cookiecutters'}\n")

    def run(*arguments: str | Path, cwd: Path, typed: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cookiecutter", "--config-file", config, TEMPLATE, *arguments],
            cwd=cwd,
            # COLUMNS: rich wraps prompts at the width of the terminal
            env=clean_environment(PWD=str(cwd), COLUMNS="400", PYTHONDONTWRITEBYTECODE="1"),
            input=typed or "",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def directory() -> Iterator[Path]:
    """Where servers live."""
    with room_for_servers() as path:
        yield path


@pytest.fixture(scope="session")
def postgres_system() -> Iterator[Postgres]:
    """A server of the machine's packages."""
    binaries = system_binaries()
    if binaries is None:
        pytest.skip("needs a PostgreSQL from the machine's packages")
    with room_for_servers(memory=True) as path:
        server = Postgres(path / "postgres-system", binaries).start()
        yield server
        server.stop()


@pytest.fixture(scope="session")
def bake(cookiecutter: Cookiecutter, tmp_path_factory: pytest.TempPathFactory) -> Bake:
    def generate(**answers: str) -> Path:
        directory = tmp_path_factory.mktemp("bake")
        done = cookiecutter("--no-input", *(f"{key}={value}" for key, value in answers.items()), cwd=directory)
        assert done.returncode == 0, done.stdout + done.stderr
        (project,) = directory.iterdir()
        return project

    return generate


@pytest.fixture(scope="session")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Uv:
    always = {
        "UV_PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
        "UV_NO_PROGRESS": "1",
        "MYPY_CACHE_DIR": str(tmp_path_factory.mktemp("mypy")),  # what projects depend on is the same in all of them
    }

    def run(*arguments: str | Path, cwd: Path, **environment: str) -> str:
        done = subprocess.run(
            [find_uv_bin(), *arguments],
            cwd=cwd,
            env=clean_environment(**always, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"uv {' '.join(map(str, arguments))}\n{done.stdout}"
        return done.stdout

    return run


#: What `.ci/run` can't install: Debian's are too old, so the machine brings them, or their tests skip even there.
BROUGHT_BY_THE_MACHINE = ("kubectl", "node", "npm")


def pytest_runtest_setup(item: pytest.Item) -> None:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    for mark in item.iter_markers("needs"):
        for what in mark.args:
            if os.geteuid() != 0 if what == "root" else shutil.which(what, path=path) is None:
                pytest.skip(f"needs {what}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    excused = any(str(report.longrepr).endswith(f"needs {what}')") for what in BROUGHT_BY_THE_MACHINE)
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail") and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report
