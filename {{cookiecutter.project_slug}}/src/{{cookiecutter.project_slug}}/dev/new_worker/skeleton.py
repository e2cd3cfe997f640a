"""A worker to begin with: what it may be called, which key it gets, and its files.

Only the standard library, and no name of this project: the template runs this file before there is a project, so that
`new-worker` and a name in the answer `workers` give the same.
"""

import keyword
import re
from collections.abc import Iterable
from pathlib import Path
from string import Template

#: Service, role and what joins them make names of 63 bytes at most: PostgreSQL's and Kubernetes' limit.
MAX_LENGTH = 30

#: Keys from the base up to this one belong to the workers of the template, generated or not.
LAST_OF_THE_TEMPLATE = 3

#: The subcommands, and words that mean something of their own behind `uv sync --extra`.
RESERVED = {
    *("dev", "doctor", "job", "keys", "migrate", "new_worker", "run", "status", "step_down", "sweep", "tasks"),
    "workers",
    *("all", "help", "test", "verify", "version"),
}

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "$distribution-$dashed"
version = "0.1.0"
description = "$words"
readme = "README.md"
requires-python = ">=3.11"
classifiers = ["Private :: Do Not Upload"]
dependencies = ["$distribution"]

# Entry point, extra and toggle share one name.
[project.entry-points."$service.workers"]
$name = "$package:worker"

[tool.uv]
cache-keys = [{ file = "pyproject.toml" }, { file = "src/**/*.*[!c]" }, { git = { commit = true } }]

[tool.uv.sources]
$distribution = { workspace = true }

[tool.hatch.build.targets.wheel]
packages = ["src/$package"]
"""

README = """\
# $words

What it does, and what it needs. One replica leads, the others stand by.

Its code is `src/$package/__init__.py`. To run it, in one environment:

```console
$$ uv sync --extra $name
$$ ${prefix}${upper}_ENABLED=true uv run $distribution run
```
"""

WORKER = '''\
"""$words: what it does, in one line."""

import structlog

from $service import Lease, Worker

PAUSE_SECONDS = 1.0

log = structlog.get_logger(__name__)


def run(lease: Lease) -> None:
    while lease.wait(PAUSE_SECONDS):
        with lease.transaction() as conn:  # commits only while this term is the current one
            conn.execute("select 1")  # your work
        log.info("$name.worked", epoch=lease.epoch)


worker = Worker(run)  # add effects="fenced" if every write goes through lease.transaction()
'''

TEST = """\
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_replica_in_which_it_is_on_leads_and_works(leader: Callable[[str], AbstractContextManager[Path]]) -> None:
    with leader("$name") as log:
        wait_until(lambda: '"$name.worked"' in log.read_text())
"""

FILES = {
    "pyproject.toml": PYPROJECT,
    "README.md": README,
    "src/$package/__init__.py": WORKER,
    "src/$package/py.typed": "",
    "tests/test_$name.py": TEST,
}


def flaw(name: str, project: Path) -> str | None:
    """What a worker of this name would break, as the end of a sentence that begins with the name; None if nothing."""
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        meant = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_").lstrip("0123456789_")
        return (
            "must be lower-case ASCII letters and digits, with single underscores between them, beginning with a"
            f" letter, such as {meant or 'invoices'}"
        )
    if len(name) > MAX_LENGTH:
        return f"has {len(name)} characters, but there is room for {MAX_LENGTH}"
    if name in (*keyword.kwlist, *keyword.softkwlist):
        return "is a Python keyword"
    if name in RESERVED:
        return "means something else on the command line"
    for path in (*project.glob(f"tests/test_{name}.py"), *project.glob(f"workers/*/tests/test_{name}.py")):
        if not path.is_relative_to(project / "workers" / name):
            return f"would give a second test_{name}.py beside {path.relative_to(project)}, which mypy refuses"
    return None


def next_key(base: int, used: Iterable[int]) -> int:
    """The number above all that were ever used."""
    return max([base + LAST_OF_THE_TEMPLATE, *used]) + 1


def files(name: str, service: str, distribution: str) -> dict[str, str]:
    """A worker's files: path in the project to content."""
    words = {
        "name": name,
        "upper": name.upper(),
        "dashed": name.replace("_", "-"),
        "words": name.replace("_", " ").capitalize(),
        "service": service,
        "prefix": f"{service.upper()}_",
        "distribution": distribution,
        "package": f"{service}_{name}",
    }
    return {
        f"workers/{name}/{Template(path).substitute(words)}": Template(content).substitute(words)
        for path, content in FILES.items()
    }
