"""Logs on standard error: for people on a terminal, JSON elsewhere; the standard library's loggers included."""

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal

import structlog
from structlog.dev import Column, ConsoleRenderer, KeyValueColumnFormatter, plain_traceback
from structlog.typing import Processor

from .keys import SERVICE

EVENT_WIDTH = 18  # `session.unreachable` is the longest event that is not rare

_PASSWORD_IN_URL = re.compile(r"(?<=://)([^\s:/@]*):[^\s/@]+@")
_PASSWORD_IN_CONNINFO = re.compile(r"\b(\w*password\s*=\s*)('(?:[^'\\]|\\+.)*'?|[^\s&'\"]+)", re.IGNORECASE)


def configure(level: str, log_format: Literal["auto", "console", "json"]) -> None:
    """Send every log of this process, structlog's and the standard library's, through one chain.

    Args:
        level: the least that is shown: "debug", "info", "warning" or "error".
        log_format: "console" for people, "json" for machines, "auto" for what standard error is connected to.
    """
    stamped: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _add_timestamp,
    ]
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*stamped, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_console(_wants_colours()) if console else _json()),
                redact,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *stamped, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def redact(_logger: Any, _method: str, line: Any) -> str:
    """Take passwords of URLs and conninfo strings out of a finished line, whatever put them there."""
    return _PASSWORD_IN_CONNINFO.sub(r"\1***", _PASSWORD_IN_URL.sub(r"\1:***@", line))


def _json() -> list[Processor]:
    # a traceback as text: without the frames' variables, which may hold secrets
    return [structlog.processors.format_exc_info, _head_first, structlog.processors.JSONRenderer(ensure_ascii=False)]


def _console(colours: bool) -> list[Processor]:
    def style(code: str) -> str:
        return f"\x1b[{code}m" if colours else ""

    dim, plain = style("2"), style("0")
    levels = {"warning": style("33"), "error": style("31"), "critical": style("31;1")}

    def column(key: str, value_style: str, width: int = 0, key_style: str | None = None) -> Column:
        return Column(key, KeyValueColumnFormatter(key_style, value_style, plain, _shown, width))

    def level(key: str, value: object) -> str:
        return f"{levels.get(str(value), dim)}{value:<7}{plain}"

    columns = [
        column("timestamp", dim),
        Column("level", level),
        column("event", style("1"), EVENT_WIDTH),
        column("", style("36"), key_style=dim),
    ]
    return [_short, ConsoleRenderer(columns=columns, exception_formatter=plain_traceback, sort_keys=False)]


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _wants_colours() -> bool:
    """As a terminal; https://no-color.org and https://force-color.org decide otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stderr.isatty()


def _add_timestamp(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event["timestamp"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _head_first(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event} | dict(event)


def _short(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """On a console: the time without its date, and a logger's name only where it is not ours."""
    event["timestamp"] = event["timestamp"].partition("T")[2]
    if str(event.get("logger")).partition(".")[0] == SERVICE:
        del event["logger"]
    return event
