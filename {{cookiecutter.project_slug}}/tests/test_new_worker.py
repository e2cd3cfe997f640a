"""`new-worker`: what it adds, what it refuses, and that nothing is left of one that failed. In a copy of the project."""

import difflib
import resource
import shutil
import signal
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from {{cookiecutter.project_slug}}.cli import main
from {{cookiecutter.project_slug}}.config import ConfigError
from {{cookiecutter.project_slug}}.dev.new_worker import LOCK, METADATA, PROJECT, REGISTRY, TOGGLES, new_worker
from {{cookiecutter.project_slug}}.keys import DISTRIBUTION, ENV_PREFIX, KEYS, SERVICE, LeaseKey

pytestmark = pytest.mark.slow  # each test copies the project

ROLE = next(iter(LeaseKey)).role
NEW = "zz_sample"  # a name that your own workers hardly have
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "uv.lock")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, and the current directory."""
    copy = shutil.copytree(PROJECT, tmp_path / "project", ignore=LEFT_OUT)
    monkeypatch.chdir(copy)
    return copy


def tree(project: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of each file, and each directory."""
    return {
        str(path.relative_to(project)): (path.stat().st_mode, b"" if path.is_dir() else path.read_bytes())
        for path in project.rglob("*")
    }


def changes(before: bytes, after: bytes) -> list[str]:
    """The lines that were added and removed, with + and -."""
    lines = difflib.ndiff(before.decode().splitlines(), after.decode().splitlines())
    return [line for line in lines if line[0] in "+-"]


def refused(name: str, project: Path) -> str:
    """The reason, if nothing at all was changed."""
    before = tree(project)
    with pytest.raises(ConfigError) as refusal:
        new_worker(name, project)
    assert tree(project) == before
    return str(refusal.value)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


# -- what it adds


def test_a_worker_gets_its_folder_and_one_line_wherever_workers_are_named(project: Path) -> None:
    before = tree(project)
    printed = new_worker(NEW, project)
    after = tree(project)
    key = max(KEYS.start + 3, *LeaseKey) + 1
    changed = {name: changes(before[name][1], after[name][1]) for name in before if before[name] != after[name]}
    assert changed == {
        REGISTRY: [f"+     {NEW.upper()} = {key}"],
        LOCK: [f"+ {NEW} {key}"],
        METADATA: [
            f'+ {NEW} = ["{DISTRIBUTION}-zz-sample"]',
            f"+ {DISTRIBUTION}-zz-sample = " + "{ workspace = true }",
            f'+     "{SERVICE}_{NEW}",',
        ],
        TOGGLES: [f"+ {ENV_PREFIX}{NEW.upper()}_ENABLED=false"],
    }
    package = f"src/{SERVICE}_{NEW}"
    assert {name for name in after.keys() - before.keys() if (project / name).is_file()} == {
        f"workers/{NEW}/{name}"
        for name in (
            "pyproject.toml",
            "README.md",
            f"{package}/__init__.py",
            f"{package}/py.typed",
            f"tests/test_{NEW}.py",
        )
    }
    assert "uv sync --all-extras" in printed
    assert f"{ENV_PREFIX}{NEW.upper()}_ENABLED=true" in printed
    assert str(key) in printed


def test_comments_in_toml_stay_where_a_person_put_them(project: Path) -> None:
    with (project / METADATA).open("a") as file:
        file.write("# the last word\n")
    edit(project / METADATA, "[project.optional-dependencies]\n", "[project.optional-dependencies] # ours\n# first\n")
    edit(project / METADATA, "forbidden_modules = [\n", "forbidden_modules = [ # never\n    # at all\n")
    before = (project / METADATA).read_bytes()
    new_worker(NEW, project)
    assert [line[0] for line in changes(before, (project / METADATA).read_bytes())] == ["+", "+", "+"]


def test_the_metadata_of_the_worker_ties_entry_point_package_and_distribution(project: Path) -> None:
    new_worker(NEW, project)
    metadata = tomllib.loads((project / f"workers/{NEW}/pyproject.toml").read_text())
    assert metadata["project"]["name"] == f"{DISTRIBUTION}-zz-sample"
    entry_points = metadata["project"]["entry-points"][f"{SERVICE}.workers"]
    assert entry_points == {NEW: f"{SERVICE}_{NEW}:worker"}


def test_each_worker_gets_the_next_key_and_none_is_used_twice(project: Path) -> None:
    first = max(KEYS.start + 3, *LeaseKey) + 1
    new_worker("zz_one", project)
    with (project / LOCK).open("a") as file:
        file.write(f"zz_retired {first + 5}\nzz_odd {KEYS.stop + 7}\n")
    new_worker("zz_two", project)
    new_worker("zz_three", project)
    lines = (project / LOCK).read_text().splitlines()
    assert lines[-5:] == [
        f"zz_one {first}",
        f"zz_retired {first + 5}",
        f"zz_odd {KEYS.stop + 7}",
        f"zz_two {first + 6}",
        f"zz_three {first + 7}",
    ]
    registry = (project / REGISTRY).read_text()
    assert f"    ZZ_ONE = {first}\n    ZZ_TWO = {first + 6}\n    ZZ_THREE = {first + 7}\n" in registry


def test_who_does_not_deploy_with_kubernetes_needs_none_of_its_files(project: Path) -> None:
    shutil.rmtree(project / "deploy")
    new_worker(NEW, project)
    assert not (project / "deploy").exists()


def test_from_a_folder_of_the_project_it_works_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "workers")
    new_worker(NEW, project)
    assert (project / "workers" / NEW).is_dir()


# -- what it refuses


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "lower-case ASCII"),
        ("Invoices", "such as invoices"),
        ("invoice-mailer", "such as invoice_mailer"),
        ("invoice mailer", "such as invoice_mailer"),
        ("invoice__mailer", "such as invoice_mailer"),
        ("_invoices", "such as invoices"),
        ("invoices_", "such as invoices"),
        ("3d_prints", "such as d_prints"),
        ("größe", "lower-case ASCII"),
        ("../../etc", "such as etc"),
        ("invoices\n", "such as invoices"),
        ("x" * 31, "31 characters, but there is room for 30"),
        ("class", "Python keyword"),
        ("match", "Python keyword"),
        ("run", "command line"),
        ("all", "command line"),
        ("dev", "command line"),
        ("config", "second test_config.py beside tests/test_config.py"),
    ],
)
def test_a_name_that_would_not_work_is_refused_with_the_reason(name: str, reason: str, project: Path) -> None:
    message = refused(name, project)
    assert message.startswith(f"{name!r} can't be the name of a worker: it ")
    assert reason in message


def test_every_name_that_is_taken_is_refused(project: Path) -> None:
    for key in LeaseKey:
        assert "is taken" in refused(key.role, project)
    with (project / LOCK).open("a") as file:
        file.write("zz_retired 7\n")
    assert "has a key" in refused("zz_retired", project)
    (project / "workers/zz_notes").mkdir()
    assert "folder workers/zz_notes" in refused("zz_notes", project)
    edit(project / METADATA, "[project.optional-dependencies]\n", '[project.optional-dependencies]\nzz-port = ["x"]\n')
    assert "has such an extra" in refused("zz_port", project)


def test_a_package_that_python_would_find_instead_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / f"{SERVICE}_zz_shadow.py").write_text("")
    monkeypatch.syspath_prepend(project)
    assert f"Python finds a package {SERVICE}_zz_shadow in {project}" in refused("zz_shadow", project)


def test_when_all_keys_are_used_up_it_says_so(project: Path) -> None:
    with (project / LOCK).open("a") as file:
        file.write(f"zz_retired {KEYS[-1]}\n")
    assert f"all keys up to {KEYS[-1]} are used" in refused(NEW, project)


@pytest.mark.parametrize(
    ("name", "before", "after", "reason"),
    [
        (METADATA, "[project]\n", "[project\n", f"nothing was changed: {METADATA}: "),
        (METADATA, "[tool.uv.sources]\n", "[tool.uv.source]\n", "does not exist"),
        (METADATA, 'type = "forbidden"', 'type = "independence"', "no contract of import-linter"),
        (REGISTRY, "class LeaseKey(", "class LeaseKey(:", "nothing was changed: invalid syntax (keys.py, line "),
        (REGISTRY, "class LeaseKey(", "class Keys(", "has no class LeaseKey"),
    ],
)
def test_files_that_are_not_understood_are_left_alone(
    name: str, before: str, after: str, reason: str, project: Path
) -> None:
    edit(project / name, before, after)
    assert reason in refused(NEW, project)


def test_a_file_that_is_missing_is_named(project: Path) -> None:
    (project / LOCK).unlink()
    assert LOCK in refused(NEW, project)


def test_outside_the_project_it_says_where_to_go(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(NEW, project).endswith(f"cd {project}")


@pytest.mark.parametrize("missing", ["tomlkit", f"{SERVICE}.dev.new_worker"])
def test_without_the_group_dev_and_from_a_wheel_it_says_what_to_run(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, f"{SERVICE}.dev.new_worker")
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["new-worker", "invoices"]) == 78
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{missing} is not there" in captured.err
    assert f"uv sync && uv run {DISTRIBUTION} new-worker invoices" in captured.err


def test_the_command_prints_what_is_wrong_and_exits_with_78(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-worker", ROLE]) == 78
    assert capsys.readouterr().err.startswith(f"{DISTRIBUTION}: the name {ROLE} is taken")


# -- all or nothing


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("step", ["mkdir", "write_bytes", "rename", "replace"])
def test_whichever_step_fails_the_tree_stays_as_it_was(
    step: str, error: BaseException, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / LOCK).chmod(0o640)
    before = tree(project)
    original = getattr(Path, step)
    done = failing = 0

    def fails_once(self: Path, *arguments: object, **options: object) -> object:
        nonlocal done
        done += 1
        if done == failing:
            raise error
        return original(self, *arguments, **options)

    while True:
        failing, done = failing + 1, 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, step, fails_once)
            with suppress(ConfigError, KeyboardInterrupt):
                new_worker(NEW, project)
        if done < failing:
            break
        assert tree(project) == before
    assert failing > 1, "the step is part of it"
    assert (project / "workers" / NEW).is_dir()
    assert (project / LOCK).stat().st_mode & 0o777 == 0o640


def test_a_disk_that_takes_no_more_changes_nothing(project: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # bytes: enough for the worker, not for the rest
    try:
        assert "nothing was changed: " in refused(NEW, project)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
