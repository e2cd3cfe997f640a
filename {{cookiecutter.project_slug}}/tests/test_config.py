"""Settings: what is wrong is said with the setting's name, and no secret is ever shown."""

import os
from pathlib import Path

import pytest

from {{cookiecutter.project_slug}}.config import ConfigError, Timing, load_settings
from {{cookiecutter.project_slug}}.keys import ENV_PREFIX

URL = f"{ENV_PREFIX}DATABASE_URL"
LEASE_URL = f"{ENV_PREFIX}LEASE_DATABASE_URL"


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def error() -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings()
    return str(caught.value)


def test_the_defaults_are_those_of_the_documentation() -> None:
    timing = load_settings().timing
    assert (timing.interval, timing.ttl, timing.stop_grace) == (1.0, 6.0, 2.0)
    assert (timing.trust, timing.kill) == (2.5, 4.5)


@pytest.mark.parametrize(("interval", "ttl", "stop_grace"), [(1, 6, 2), (0.2, 1.5, 0.5), (5, 60, 20), (1, 3600, 0)])
def test_a_worker_is_told_then_killed_then_succeeded(interval: float, ttl: float, stop_grace: float) -> None:
    timing = Timing(interval, ttl, stop_grace)
    assert 2 * interval < timing.trust <= timing.kill < timing.horizon < ttl
    assert timing.kill - timing.trust == pytest.approx(stop_grace)


def test_timing_that_leaves_no_room_is_refused_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}TTL_SECONDS", "5")
    message = error()
    assert "2 * 1 >= 5 - 1 - 2" in message
    assert f"raise {ENV_PREFIX}TTL_SECONDS" in message


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "3601"])
def test_a_duration_that_is_none_is_refused_with_its_setting(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}TTL_SECONDS", value)
    assert error().startswith(f"{ENV_PREFIX}TTL_SECONDS: ")


def test_all_wrong_settings_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}TTL_SECONDS", "soon")
    monkeypatch.setenv(f"{ENV_PREFIX}LOG_LEVEL", "loud")
    message = error()
    assert f"{ENV_PREFIX}TTL_SECONDS" in message
    assert f"{ENV_PREFIX}LOG_LEVEL" in message


def test_a_misspelt_setting_is_refused_with_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}TTL_SECOND", "9")
    assert error() == f"unknown setting {ENV_PREFIX}TTL_SECOND: did you mean {ENV_PREFIX}TTL_SECONDS?"


def test_what_kubernetes_adds_for_a_service_of_our_name_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8080_TCP", "PORT_8080_TCP_ADDR"):
        monkeypatch.setenv(f"{ENV_PREFIX}{name}", "tcp://10.0.0.1:8080")
    load_settings()


def test_the_lease_s_url_defaults_to_the_one_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL, "postgresql://pooler/db")
    assert load_settings().lease_url == "postgresql://pooler/db"
    monkeypatch.setenv(LEASE_URL, "postgresql://server/db")
    assert load_settings().lease_url == "postgresql://server/db"
    assert load_settings().work_url == "postgresql://pooler/db"


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_database_the_message_names_the_setting(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv(URL, value)
    with pytest.raises(ConfigError, match=f"set {URL}=postgresql://"):
        _ = load_settings().lease_url


def test_the_env_file_is_read_and_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(f"{ENV_PREFIX}TTL_SECONDS=7\n{ENV_PREFIX}POOL_MAX_SIZE=9\n")
    monkeypatch.setenv(f"{ENV_PREFIX}TTL_SECONDS", "8")
    settings = load_settings()
    assert (settings.ttl_seconds, settings.pool_max_size) == (8, 9)


def test_a_misspelt_setting_in_the_env_file_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"{ENV_PREFIX}DATABASE_ULR=postgresql://u:hunter2@h/d\n")
    message = error()
    assert f"did you mean {URL}?" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "value", ["hunter2", "postgresql://u:hunter2@h/d?no=1", "host=h password='hunter2", "hunter2://x"]
)
def test_a_url_that_is_none_is_refused_without_showing_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL, value)
    message = error()
    assert message.startswith(f"{URL}: ")
    assert "hunter2" not in message


def test_a_password_is_in_no_representation_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL, "postgresql://u:hunter2@h/d")
    settings = load_settings()
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
