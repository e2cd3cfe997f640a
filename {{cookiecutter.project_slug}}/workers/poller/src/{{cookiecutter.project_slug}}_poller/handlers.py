"""Your handlers, one for each kind of task. The one below is an example."""

from typing import Any

import psycopg
import structlog

from .registry import Task, handler

log = structlog.get_logger(__name__)


@handler("echo")
def echo(conn: psycopg.Connection[Any], task: Task) -> None:
    """Log the payload."""
    log.info("task.echo", id=task.id, payload=task.payload)
