"""Generating a project, next to two well-known generators; and from nothing to three running replicas."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laboratory.environment import clean_environment

from . import TEMPLATE
from .contestants import uv

GENERATORS = {  # those that bring their templates along in the package; others download them, which can't be done here
    "PyScaffold": ("pyscaffold==4.6", ("putup", "demo")),
    "Django": ("django==5.2.19", ("django-admin", "startproject", "demo")),
}


@dataclass(frozen=True)
class Generated:
    """Default answers; `seconds` has one value a trial."""

    name: str
    seconds: list[float]
    files: int


@dataclass(frozen=True)
class FirstMinute:
    """Seconds from an empty directory, without a virtual environment, to three replicas with a leader for each role."""

    seconds: list[float]


def generate(name: str, command: Sequence[str | Path], trials: int) -> Generated:
    seconds, files = [], 0
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            started = time.monotonic()
            subprocess.run(command, cwd=directory, env=clean_environment(), check=True, capture_output=True)
            seconds.append(time.monotonic() - started)
            files = sum(path.is_file() and ".git" not in path.parts for path in Path(directory).rglob("*"))
    return Generated(name, seconds, files)


def first_minute(directory: Path, trials: int) -> FirstMinute:
    """The README's command, in a clone; the first run fills the caches and does not count."""
    clone = directory / "clone"
    subprocess.run(["git", "clone", "-q", TEMPLATE, clone], check=True)
    command = next(
        line.removeprefix("$ ") for line in (clone / "README.md").read_text().splitlines() if line.endswith(" dev")
    )
    seconds = []
    for _ in range(trials + 1):
        subprocess.run(["git", "clean", "-dfxq"], cwd=clone, check=True)
        started = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=clone,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if "Kill it" in line:
                break
        else:
            raise AssertionError("".join(output[-20:]))
        seconds.append(time.monotonic() - started)
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        process.wait()
    return FirstMinute(seconds[1:])


def measure(directory: Path, trials: int) -> list[Generated]:
    ours = [sys.executable, "-m", "cookiecutter", "--no-input", str(TEMPLATE)]
    found = [generate("this template", ours, trials)]
    for name, (package, command) in GENERATORS.items():
        environment = directory / name
        uv("venv", "-q", environment)
        uv("pip", "install", "-q", "-p", environment / "bin" / "python", package)
        found.append(generate(name, [environment / "bin" / command[0], *command[1:]], trials))
    return found
