"""Both gates of a worker, on real distributions in a directory of their own."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from {{cookiecutter.project_slug}}.config import ConfigError
from {{cookiecutter.project_slug}}.gates import Gate, State, evaluate, load, open_workers
from {{cookiecutter.project_slug}}.keys import DISTRIBUTION, ENTRY_POINT_GROUP, ENV_PREFIX, SERVICE, LeaseKey

ROLE = next(iter(LeaseKey)).role
TOGGLE = f"{ENV_PREFIX}{ROLE.upper()}_ENABLED"

GOOD = f"from {SERVICE} import Worker\nworker = Worker(lambda lease: None)\n"

Install = Callable[..., str]


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting, no `.env`, and no distribution but those that a test installs."""
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(
        sys, "path", [str(site), *(path for path in sys.path if "python3" in path and "-packages" not in path)]
    )


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Installs a worker distribution, as pip would leave it on the disk; returns its module's name."""
    site = tmp_path / "site"

    def one(role: str = ROLE, code: str = GOOD, distribution: str | None = None, entry: str = "worker") -> str:
        name = distribution or f"{DISTRIBUTION}-{role}"
        module = f"gated_{len(list(site.iterdir()))}_{tmp_path.name.replace('-', '_')}"
        (site / f"{module}.py").write_text(code)
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{role} = {module}:{entry}\n")
        importlib.invalidate_caches()
        return module

    return one


def gate(role: str = ROLE) -> Gate:
    return next(gate for gate in evaluate() if gate.role == role)


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        open_workers(evaluate())
    return str(caught.value)


# -- the table


@pytest.mark.parametrize("value", [None, "", "false"])
def test_a_worker_that_is_not_installed_is_absent(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv(TOGGLE, value)
    assert gate().state is State.ABSENT
    assert open_workers(evaluate()) == {}


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", "OFF"])
def test_an_installed_worker_is_off_and_not_imported(
    value: str | None, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install()
    if value is not None:
        monkeypatch.setenv(TOGGLE, value)
    assert gate().state is State.OFF
    assert TOGGLE in gate().reason
    assert open_workers(evaluate()) == {}
    assert module not in sys.modules


@pytest.mark.parametrize("value", ["1", "true", "Yes", "ON", " true "])
def test_an_installed_worker_that_is_on_is_imported(
    value: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install()
    monkeypatch.setenv(TOGGLE, value)
    gates = evaluate()
    assert module not in sys.modules
    assert list(open_workers(gates)) == [ROLE]
    assert module in sys.modules


def test_a_worker_that_is_on_and_not_installed_is_refused_with_the_command_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOGGLE, "true")
    message = refusal()
    assert f"uv sync --extra {ROLE}" in message
    assert f"pip install '{DISTRIBUTION}[{ROLE}]'" in message


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("worker = 'not one'", "is no Worker but of type str"),
        ("", "has no attribute 'worker'"),
    ],
)
def test_a_worker_that_can_not_be_imported_is_refused_with_the_cause(
    code: str, cause: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install(code=code)
    monkeypatch.setenv(TOGGLE, "true")
    message = refusal()
    assert cause in message
    assert module in message


@pytest.mark.parametrize(
    "name",
    [f"{ROLE[:-1].upper()}_ENABLED", f"{ROLE.upper()}_ENABLE", f"{ROLE.upper()}_ENABLD", f"ENABLE_{ROLE.upper()}"],
)
@pytest.mark.parametrize("value", ["true", "false"])
def test_an_unknown_toggle_is_refused_with_the_nearest_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}{name}", value)
    message = refusal()
    assert f"{ENV_PREFIX}{name} " in message
    assert f"did you mean {TOGGLE}?" in message


def test_a_toggle_that_resembles_none_is_refused_with_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}ZZZ_ENABLED", "true")
    assert f"known are {TOGGLE}" in refusal()


def test_a_value_that_is_no_boolean_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv(TOGGLE, "maybe")
    assert f"{TOGGLE} is 'maybe', which is no boolean" in refusal()


# -- who provides a worker


def test_a_worker_of_another_distribution_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(distribution="somebody-elses")
    monkeypatch.setenv(TOGGLE, "true")
    assert "somebody-elses" in refusal()
    assert module not in sys.modules


def test_a_worker_that_two_distributions_provide_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    install(distribution="somebody-elses")
    monkeypatch.setenv(TOGGLE, "true")
    ours = f"{DISTRIBUTION}-{ROLE.replace('_', '-')}"
    assert f"2 entry points claim to be it, of {ours}, somebody-elses" in refusal()


def test_the_spelling_of_a_distribution_does_not_matter(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(distribution=f"{DISTRIBUTION}.{ROLE}".replace("-", "_").title())
    monkeypatch.setenv(TOGGLE, "true")
    assert list(open_workers(evaluate())) == [ROLE]


def test_a_worker_without_a_key_is_refused_only_when_it_is_on(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("newcomer")
    assert gate("newcomer").state is State.OFF
    monkeypatch.setenv(f"{ENV_PREFIX}NEWCOMER_ENABLED", "true")
    assert "newcomer has no lease key" in refusal()


# -- the environment


def test_everything_that_is_wrong_is_told_at_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(code="import no_such_module_anywhere")
    monkeypatch.setenv(TOGGLE, "true")
    monkeypatch.setenv(f"{ENV_PREFIX}ZZZ_ENABLED", "true")
    monkeypatch.setenv(f"{ENV_PREFIX}NEWCOMER_ENABLED", "true")
    assert len(refusal().splitlines()) == 3


def test_a_toggle_may_stand_in_the_env_file_and_the_environment_wins(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    (tmp_path / ".env").write_text(f"{TOGGLE}=true\n")
    assert gate().state is State.OPEN
    monkeypatch.setenv(TOGGLE, "false")
    assert gate().state is State.OFF


def test_a_worker_s_own_settings_are_no_toggles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "BATCH_SIZE", "INTERVAL_SECONDS"):
        monkeypatch.setenv(f"{ENV_PREFIX}{ROLE.upper()}_{name}", "x")
    assert [gate.state for gate in evaluate()] == [State.ABSENT] * len(LeaseKey)


# -- a command that needs a worker, whatever its toggle says


def test_a_worker_that_a_command_needs_is_imported_without_its_toggle(install: Install) -> None:
    module = install()
    load(ROLE, "job run")
    assert module in sys.modules


@pytest.mark.parametrize(
    ("distribution", "code", "message"),
    [
        (None, "1 / 0", "but importing .* fails: ZeroDivisionError"),
        ("evil", GOOD, "of the package evil"),
        ("", "", f"which is not installed. Install it: uv sync --extra {ROLE}"),
    ],
)
def test_a_worker_that_a_command_needs_and_cannot_have_is_refused_with_the_reason(
    distribution: str | None, code: str, message: str, install: Install
) -> None:
    if distribution != "":
        install(code=code, distribution=distribution)
    with pytest.raises(ConfigError, match=f"^`job run` needs the worker {ROLE}, .*{message}"):
        load(ROLE, "job run")
