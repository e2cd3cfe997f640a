"""The build-time gate, on real builds: without its extra, no line of a worker is there, however it is installed."""

import json
import re
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from conftest import Bake, Uv
from laboratory.environment import clean_environment
from local_extensions import TAKEN

pytestmark = pytest.mark.slow

WORKERS = {"poller", "scheduler", "reconciler"}

INSTALLED = """
import importlib.metadata, importlib.util, json
names = ["acme_billing", *(f"acme_billing_{name}" for name in ("poller", "scheduler", "reconciler"))]
print(json.dumps({
    "modules": [name for name in names if importlib.util.find_spec(name)],
    "entry_points": sorted(point.name for point in importlib.metadata.entry_points(group="acme_billing.workers")),
    "distributions": sorted({point.metadata["Name"] for point in importlib.metadata.distributions()}),
    "packages": sorted(importlib.metadata.packages_distributions()),
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def installed(python: Path, cwd: Path) -> dict[str, list[str]]:
    """What an environment holds."""
    found: dict[str, list[str]] = json.loads(run(python, "-c", INSTALLED, cwd=cwd))
    return found


def assert_workers(found: dict[str, list[str]], *workers: str) -> None:
    """Exactly these are installed, by every way to see it."""
    assert found["modules"] == ["acme_billing", *(f"acme_billing_{name}" for name in workers)]
    assert found["entry_points"] == sorted(workers)
    ours = {name for name in found["distributions"] if name.startswith("acme-billing")}
    assert ours == {"acme-billing", *(f"acme-billing-{name}" for name in workers)}


@pytest.fixture(scope="module")
def built(bake: Bake, uv: Uv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with wheel and sdist of the default project and of each of its workers."""
    project, directory = bake(), tmp_path_factory.mktemp("built")
    (project / "workers" / "notes.py").write_text("# not to be swept in either\n")
    for source in (project, *(project / "workers" / name for name in WORKERS)):
        uv("build", "--out-dir", directory, cwd=source)
    return directory


@pytest.fixture(scope="module")
def wheelhouse(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels alone, and those of all that they depend on: what a machine without an index is given."""
    directory = tmp_path_factory.mktemp("wheelhouse")
    wheels = [wheel.rename(directory / wheel.name) for wheel in built.glob("*.whl")]
    venv.create(directory / "venv", with_pip=True)
    run(
        directory / "venv/bin/pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        *wheels,
        "-d",
        directory,
        cwd=directory,
    )
    return directory


# What is in the packages


def test_wheel_and_sdist_of_the_service_hold_no_file_of_a_worker(bake: Bake, uv: Uv, tmp_path: Path) -> None:
    project = bake()
    (project / "workers" / "notes.py").write_text("# not to be swept in either\n")
    uv("build", "--out-dir", tmp_path, cwd=project)
    wheel = zipfile.ZipFile(tmp_path / "acme_billing-0.1.0-py3-none-any.whl").namelist()
    with tarfile.open(tmp_path / "acme_billing-0.1.0.tar.gz") as archive:
        sdist = [name.removeprefix("acme_billing-0.1.0/") for name in archive.getnames()]
    for name in wheel:
        assert re.match(r"acme_billing/|acme_billing-0\.1\.0\.dist-info/", name)
    for name in sdist:
        assert re.match(
            r"src/acme_billing/|(README\.md|LICENSE|CHANGELOG\.md|pyproject\.toml|PKG-INFO|\.gitignore)$", name
        )
    for name in (*wheel, *sdist):
        assert not any(worker in name for worker in WORKERS)
        assert not name.startswith(("workers", "tests"))
    package = project / "src"
    source = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    development = {name for name in source if name.startswith("acme_billing/dev/new_worker/")}
    assert len(development) == 2
    source -= development  # it is made of a worker's code
    assert source == {name for name in wheel if ".dist-info" not in name}
    assert {"acme_billing/py.typed", "acme_billing/schema/0001_lease.sql"} <= source
    assert source == {name.removeprefix("src/") for name in sdist if name.startswith("src/")}


@pytest.mark.parametrize("worker", sorted(WORKERS))
def test_wheel_of_a_worker_holds_its_own_files_only(bake: Bake, uv: Uv, tmp_path: Path, worker: str) -> None:
    project = bake()
    uv("build", "--wheel", "--out-dir", tmp_path, cwd=project / "workers" / worker)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert all(
        name.startswith((f"acme_billing_{worker}/", f"acme_billing_{worker}-0.1.0.dist-info/")) for name in names
    )
    assert f"acme_billing_{worker}/__init__.py" in names


def test_metadata_forbids_upload_and_carries_odd_answers_as_they_are(bake: Bake, uv: Uv, tmp_path: Path) -> None:
    author, description = 'Zoë "Z" O\'Neill \\ 👩‍💻, Inc. <x>', "\"]'''\\ {{ x }} {% y %} # = [tool.x] 世界"
    project = bake(author_name=author, author_email="o'neill+{x}@example.com", description=description)
    for source in (project, *(project / "workers" / name for name in WORKERS)):
        uv("build", "--wheel", "--out-dir", tmp_path, cwd=source)
    for wheel in tmp_path.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        assert "Classifier: Private :: Do Not Upload\n" in metadata
        if wheel.name.startswith("acme_billing-"):
            assert f"Summary: {description}\n" in metadata
            assert "License-Expression: MIT\n" in metadata
            assert "o'neill+{x}@example.com" in metadata


# What pip and uv install


def test_pip_installs_from_a_wheelhouse_no_worker_or_the_one_that_is_asked_for(
    wheelhouse: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    pip = (tmp_path / "venv/bin/pip", "install", "--quiet", "--no-index", "--find-links", wheelhouse)
    python = tmp_path / "venv/bin/python"
    run(*pip, "acme-billing", cwd=tmp_path)
    assert_workers(installed(python, tmp_path))
    before = installed(python, tmp_path)["distributions"]
    done = subprocess.run(
        [tmp_path / "venv/bin/acme-billing", "new-worker", "invoices"],
        cwd=tmp_path,
        env=clean_environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78
    assert "new-worker is for a checkout with the dependency group `dev`" in done.stderr
    run(*pip, "acme-billing[poller]", cwd=tmp_path)
    after = installed(python, tmp_path)
    assert_workers(after, "poller")
    assert set(after["distributions"]) - set(before) == {"acme-billing-poller"}


def test_uv_syncs_no_worker_the_one_that_is_asked_for_or_all(bake: Bake, uv: Uv) -> None:
    project = bake()
    python = project / ".venv/bin/python"
    uv("sync", "--no-dev", cwd=project)
    none = installed(python, project)
    assert_workers(none)
    uv("sync", "--no-dev", "--extra", "poller", cwd=project)
    poller = installed(python, project)
    assert_workers(poller, "poller")
    assert set(poller["distributions"]) - set(none["distributions"]) == {"acme-billing-poller"}
    uv("sync", "--no-dev", "--all-extras", cwd=project)
    assert_workers(installed(python, project), "poller", "scheduler", "reconciler")
    uv("sync", "--no-dev", cwd=project)
    assert_workers(installed(python, project))


def test_a_changed_file_is_in_the_next_sync_without_editable(bake: Bake, uv: Uv) -> None:
    """Before cache-keys, uv went on with the wheel that it had built first (measured with 0.13.9)."""
    project = bake()
    python = project / ".venv/bin/python"
    sync = ("sync", "--no-dev", "--no-editable", "--extra", "poller")
    uv(*sync, cwd=project)
    for name, path in (
        ("acme_billing", project / "src/acme_billing"),
        ("acme_billing_poller", project / "workers/poller/src/acme_billing_poller"),
    ):
        (path / "added.py").write_text("VALUE = 1\n")
        for expected in (1, 2):
            (path / "added.py").write_text(f"VALUE = {expected}\n")
            uv(*sync, cwd=project)
            seen = run(python, "-c", f"import {name}.added as m; print(m.VALUE, m.__file__)", cwd=project).split()
            assert seen[0] == str(expected)
            assert "site-packages" in seen[1]


@pytest.mark.needs("git")
def test_a_deleted_file_is_gone_after_its_commit_without_editable(bake: Bake, uv: Uv) -> None:
    """A retention rule that was deleted must not go on deleting rows."""
    project = bake()
    rule = "workers/reconciler/src/acme_billing_reconciler/rules/job_run.py"
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.com")
    sync = ("sync", "--no-dev", "--no-editable", "--extra", "reconciler")
    run(*git, "init", "--quiet", cwd=project)
    run(*git, "add", ".", cwd=project)
    run(*git, "commit", "--quiet", "-m", "generated", cwd=project)
    uv(*sync, cwd=project)
    run(*git, "rm", "--quiet", rule, cwd=project)
    run(*git, "commit", "--quiet", "-m", "no rule", cwd=project)
    uv(*sync, cwd=project)
    code = "import importlib.util as u; print(u.find_spec('acme_billing_reconciler.rules.job_run'))"
    assert run(project / ".venv/bin/python", "-c", code, cwd=project) == "None\n"


def test_an_index_that_offers_a_workers_name_is_not_asked(bake: Bake, uv: Uv, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "acme_billing_poller-99.0-py3-none-any.whl", "w") as wheel:
        info = "acme_billing_poller-99.0.dist-info"
        wheel.writestr("acme_billing_poller/__init__.py", "raise SystemExit('not ours')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: acme-billing-poller\nVersion: 99.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    project = bake()
    code = "import importlib.metadata as m; print(m.version('acme-billing-poller'))"
    for install in (("sync", "--no-dev", "--extra", "poller"), ("pip", "install", "--reinstall", ".[poller]")):
        uv(*install, "--find-links", tmp_path, cwd=project)
        assert run(project / ".venv/bin/python", "-c", code, cwd=project) == "0.1.0\n"
    lock = (project / "uv.lock").read_text()
    assert 'name = "acme-billing-poller"\nversion = "0.1.0"\nsource = { editable = "workers/poller" }' in lock


# Names


def test_no_slug_can_be_the_name_of_something_that_a_project_installs_or_holds(bake: Bake, uv: Uv) -> None:
    project = bake()
    uv("sync", "--all-extras", cwd=project)
    found = installed(project / ".venv/bin/python", project)
    commands = {path.name for path in (project / ".venv/bin").iterdir()}
    files = {path.stem for path in project.iterdir() if path.is_dir() or path.suffix == ".py"}
    dashed = {*found["distributions"], *found["packages"], *commands, *files}
    names = {name.replace("-", "_").lower() for name in dashed}
    names = {name for name in names if re.fullmatch("[a-z][a-z0-9_]*", name) and not name.startswith("acme_billing")}
    assert not names - set().union(*TAKEN.values())


# The guards of a generated project


@pytest.fixture(scope="module")
def guarded(bake: Bake, uv: Uv) -> Path:
    project = bake()
    uv("sync", "--all-extras", cwd=project)
    return project


GUARDS = [
    ("src/acme_billing/keys.py", "POLLER = 2218787585", "POLLER = 2218787599", "must stay in keys.py as they are"),
    ("src/acme_billing/keys.py", "    POLLER = 2218787585\n", "", "must stay in keys.py as they are"),
    ("src/acme_billing/keys.py", "    POLLER", "    JANITOR = 5\n    POLLER", "freeze each new key with a line"),
    ("lease-keys.lock", "poller 2218787585", "poller 2218787586", "a key stands twice"),
    (
        "src/acme_billing/keys.py",
        "import enum\n",
        "import enum\nfrom . import schema\n",
        "keys is not allowed to import",
    ),
    ("src/acme_billing/supervisor.py", '"""\n', '"""\nimport acme_billing_poller\n', "never imports a worker BROKEN"),
    ("src/acme_billing/helpers.py", "", "x = 1\n", "helpers"),
    (
        "workers/poller/src/acme_billing_poller/poller.py",
        "import asyncio\n",
        "import asyncio\nfrom acme_billing.lease import elector\n",
        "may only use",
    ),
]


@pytest.mark.parametrize(("name", "before", "after", "message"), GUARDS)
def test_a_generated_project_guards_its_keys_and_layers(
    guarded: Path, name: str, before: str, after: str, message: str
) -> None:
    path = guarded / name
    original = path.read_text() if path.exists() else ""
    assert before in original
    try:
        path.write_text(original.replace(before, after, 1))
        done = subprocess.run(
            [
                guarded / ".venv/bin/pytest",
                "--noconftest",
                "-p",
                "no:cacheprovider",
                "tests/test_keys.py",
                "tests/test_layers.py",
            ],
            cwd=guarded,
            env=clean_environment(COLUMNS="200"),
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1, done.stdout
        assert message in done.stdout
    finally:
        path.write_text(original) if original else path.unlink()


def test_a_new_role_with_a_key_of_its_own_is_welcome(guarded: Path) -> None:
    registry, lock = guarded / "src/acme_billing/keys.py", guarded / "lease-keys.lock"
    originals = registry.read_text(), lock.read_text()
    try:
        registry.write_text(originals[0].replace("    POLLER", "    JANITOR = 2218787650\n    POLLER", 1))
        lock.write_text(originals[1] + "janitor 2218787650\n")
        run(guarded / ".venv/bin/pytest", "--noconftest", "-p", "no:cacheprovider", "tests/test_keys.py", cwd=guarded)
    finally:
        registry.write_text(originals[0])
        lock.write_text(originals[1])
