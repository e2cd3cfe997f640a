"""A worker of one's own: the command and the answer give the same, it passes every check, and a newcomer sees it lead."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from uv import find_uv_bin

from conftest import Bake, Uv
from laboratory.environment import clean_environment

pytestmark = pytest.mark.slow

ADD = """
import sys
from pathlib import Path
sys.path.insert(0, "src")
from acme_billing.dev.new_worker import new_worker
for name in sys.argv[1:]:
    new_worker(name, Path.cwd())
"""


def tracked(project: Path) -> dict[str, bytes]:
    """What would be committed: no virtual environment, no lock file, nothing that tools leave behind."""
    left_out = re.compile(r"(^|/)(\.[^/]+(?<!\.gitignore)|__pycache__|uv\.lock)(/|$)")
    names = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    return {name: (project / name).read_bytes() for name in names if not left_out.search(name)}


def commands(readme: str, heading: str) -> list[str]:
    """What the first console block of a section says to type."""
    section = readme.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = section.partition("```console\n")[2].partition("```")[0]
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


def test_a_newcomer_who_types_what_the_readme_says_sees_a_new_worker_lead_in_less_than_five_minutes(bake: Bake) -> None:
    project = bake()
    readme = (project / "README.md").read_text()
    setup = [line for line in commands(readme, "The first minute") if "sync" in line]
    *steps, show = commands(readme, "Writing a worker")
    assert [len(setup), len(steps)] == [1, 2]
    environment = clean_environment(PATH=f"{Path(find_uv_bin()).parent}{os.pathsep}{os.environ['PATH']}")
    started = time.monotonic()
    for line in (*setup, *steps):
        subprocess.run(shlex.split(line), cwd=project, env=environment, check=True, timeout=300)
    with subprocess.Popen(
        shlex.split(show),
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as dev:
        assert dev.stdout is not None
        shown = ""
        wanted = (r"replica \d leads .*invoice_mailer", r"invoice_mailer\.worked +epoch=1")
        for line in dev.stdout:
            shown += line
            if all(re.search(pattern, shown) for pattern in wanted):
                break
        seconds = time.monotonic() - started
        dev.send_signal(signal.SIGINT)
        shown += dev.stdout.read()
    assert dev.returncode == 0, shown
    assert all(re.search(pattern, shown) for pattern in wanted), shown
    assert seconds < 300
    expected = tracked(bake(workers="poller,scheduler,reconciler,invoice_mailer"))
    assert tracked(project) == expected


def test_a_name_in_the_answer_gives_what_the_command_gives_and_passes_every_check(bake: Bake, uv: Uv) -> None:
    complete = bake(workers="invoice_mailer")
    uv("sync", "--all-extras", cwd=complete)
    python, command = complete / ".venv/bin/python", complete / ".venv/bin/acme-billing"
    for before, added in (("poller", "zebra,a"), ("reconciler,scheduler", "x2"), ("first", "second")):
        project = bake(workers=before)
        subprocess.run(
            [python, "-B", "-c", ADD, *added.split(",")],
            cwd=project,
            env=clean_environment(),
            check=True,
            timeout=60,
        )
        assert tracked(project) == tracked(bake(workers=f"{before},{added}"))
    for tool in (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)):
        uv("run", "--no-sync", *tool, cwd=complete)
    checks = ("tests/test_keys.py", "tests/test_layers.py", "tests/test_gates.py", "workers")
    assert " passed" in uv("run", "--no-sync", "pytest", "-q", *checks, cwd=complete)
    subprocess.run([python, "-B", "-c", ADD, "zebra"], cwd=complete, env=clean_environment(), check=True, timeout=60)
    with subprocess.Popen(
        [command, "dev"], cwd=complete, env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as dev:
        assert dev.stdout is not None
        assert (
            "Not installed, so not shown: zebra. To install all there are: uv sync --all-extras"
            in dev.stdout.readline()
        )
        dev.send_signal(signal.SIGINT)
        dev.stdout.read()
    broken = complete / "workers/invoice_mailer/src/acme_billing_invoice_mailer/__init__.py"
    broken.write_text(broken.read_text().replace("PAUSE_SECONDS = 1.0", "PAUSE_SECONDS = 1 / 0"))
    with pytest.raises(AssertionError, match="ZeroDivisionError"):  # the worker's test can fail
        uv("run", "--no-sync", "pytest", "-q", "workers", cwd=complete)
