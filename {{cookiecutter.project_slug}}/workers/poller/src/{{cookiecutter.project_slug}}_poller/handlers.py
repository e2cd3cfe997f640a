"""Your handlers, one for each kind of task. The one below is an example."""

import psycopg
import structlog

from .poller import Payload, handler

log = structlog.get_logger(__name__)


@handler("echo")
def echo(conn: psycopg.Connection, payload: Payload) -> None:
    """Log the payload."""
    log.info("task.echo", payload=payload)
