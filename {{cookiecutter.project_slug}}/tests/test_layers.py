"""Imports run one way, and workers stay on the service's public side; the rules stand in pyproject.toml."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
SERVICE = "{{cookiecutter.project_slug}}"

#: What a worker may import of the service, beside the package itself. Everything else may change without asking.
PUBLIC = {"exclusive", "ledger", "task"}
PRIVATE = {path.stem for path in (PROJECT / "src" / SERVICE).iterdir() if not path.name.startswith("__")} - PUBLIC


def imported_modules(source: str) -> set[str]:
    """Names of all modules and members that a piece of Python imports absolutely."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_modules_import_only_what_stands_below_them() -> None:
    # A process of its own: import-linter switches off all loggers of the process that it runs in.
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("worker", sorted(PROJECT.glob("workers/*/src")), ids=lambda path: path.parent.name)
def test_a_worker_imports_public_modules_of_the_service_only(worker: Path) -> None:
    for path in worker.rglob("*.py"):
        ours = [name.split(".") for name in imported_modules(path.read_text()) if name.startswith(f"{SERVICE}.")]
        private = {".".join(parts) for parts in ours if parts[1] in PRIVATE}
        assert not private, f"{path.relative_to(PROJECT)} imports {private}, but may only use {PUBLIC}"
