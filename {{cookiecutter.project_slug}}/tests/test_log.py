"""Logs: one chain for structlog and the standard library, for people on a terminal and JSON elsewhere."""

import json
import logging
import os
import pty
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import structlog
from pydantic import SecretStr

from {{cookiecutter.project_slug}} import log
from {{cookiecutter.project_slug}}.keys import SERVICE

LOGGER = f"{SERVICE}.somewhere"

ON_A_TERMINAL = f"""
import structlog
from {SERVICE} import log
log.configure("info", "auto")
structlog.get_logger("{LOGGER}").warning("lease.lost", role="mailer", roles=["a", "b"])
"""


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == "", "standard output is for the answers of commands"
    return [json.loads(line) for line in captured.err.splitlines()]


def terminal(**environment: str) -> str:
    """What a process writes to a terminal on standard error."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run([sys.executable, "-c", ON_A_TERMINAL], stderr=theirs, env=kept | environment, check=True)
    os.close(theirs)
    try:
        return os.read(ours, 4096).decode()
    finally:
        os.close(ours)


def test_a_line_of_json_has_time_level_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    structlog.get_logger(LOGGER).info("lease.acquired", role="mailer", epoch=3)
    (line,) = lines(capsys)
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert line | {"timestamp": ""} == {
        "timestamp": "",
        "level": "info",
        "event": "lease.acquired",
        "role": "mailer",
        "epoch": 3,
        "logger": LOGGER,
    }
    assert datetime.fromisoformat(line["timestamp"]).utcoffset() == timedelta(0)


def test_the_standard_library_s_loggers_go_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    logging.getLogger("psycopg.pool").warning("no luck with %r", "pool-1", extra={"tries": 2})
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["logger"]) == ("no luck with 'pool-1'", "warning", "psycopg.pool")
    assert line["tries"] == 2


def test_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("careful", stacklevel=1)
    (line,) = lines(capsys)
    assert "careful" in line["event"]


def test_configured_twice_a_line_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    log.configure("warning", "json")
    structlog.get_logger(LOGGER).info("no")
    structlog.get_logger(LOGGER).warning("yes")
    assert [line["event"] for line in lines(capsys)] == ["yes"]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_below_the_level_nothing_is_written(log_format: Any, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning", log_format)
    structlog.get_logger(LOGGER).info("no")
    logging.getLogger("psycopg.pool").info("no")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize("standard_library", [False, True])
def test_an_exception_is_written_with_its_cause_and_without_variables(
    log_format: Any, standard_library: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("info", log_format)
    variable = "hunter" + "2"
    try:
        try:
            int(variable[:0])
        except ValueError as error:
            raise RuntimeError("outer") from error
    except RuntimeError:
        if standard_library:
            logging.getLogger("x").exception("worker.failed")
        else:
            structlog.get_logger(LOGGER).exception("worker.failed")
    written = capsys.readouterr().err
    text = json.loads(written)["exception"] if log_format == "json" else written
    assert re.search(r"^ValueError: .*^RuntimeError: outer$", text, re.MULTILINE | re.DOTALL)
    assert variable not in written


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize(
    "secret",
    [
        "postgresql://user:hunter2@host/db",
        "postgresql://host/db?user=u&password=hunter2&sslmode=require",
        "host=h password=hunter2 dbname=d",
        r"host=h password = 'hunter2 \' hunter2' dbname=d",
        SecretStr("hunter2"),
    ],
)
def test_a_password_is_never_written(log_format: Any, secret: Any, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", log_format)
    structlog.get_logger(LOGGER).info("a.field", url=secret)
    structlog.get_logger(LOGGER).info(f"an.event {secret}")
    logging.getLogger("x").info("a message %s", secret)
    try:
        raise RuntimeError(secret)
    except RuntimeError:
        structlog.get_logger(LOGGER).exception("an.exception")
    written = capsys.readouterr().err
    assert "an.exception" in written
    assert "hunter2" not in written
    assert "***" in written


def test_values_that_json_does_not_know_are_written_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    structlog.get_logger(LOGGER).info("odd", thing=LOGGER.encode(), text="é")
    (line,) = lines(capsys)
    assert line["thing"] == repr(LOGGER.encode())
    assert line["text"] == "é"


def test_on_a_terminal_lines_are_for_people_and_coloured() -> None:
    written = terminal()
    assert "\x1b[33mwarning" in written
    plain = re.sub(r"\x1b\[[\d;]*m", "", written).strip()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}Z warning lease\.lost +role=mailer roles=a, b", plain)


def test_no_color_is_heeded() -> None:
    written = terminal(NO_COLOR="1")
    assert "lease.lost" in written
    assert "\x1b" not in written


def test_elsewhere_lines_are_json() -> None:
    done = subprocess.run([sys.executable, "-c", ON_A_TERMINAL], capture_output=True, check=True)
    assert json.loads(done.stderr)["event"] == "lease.lost"
