"""One connection for a one-shot command, and errors that name the database but never a password."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from ..config import ConfigError
from ..keys import DISTRIBUTION, SERVICE
from ..log import redact

CONNECT_TIMEOUT_SECONDS = 5


class Unreachable(Exception):
    """The database gives no answer, or none now: trying again later may help (exit code 75)."""


@contextmanager
def database(url: str, application_name: str = f"{SERVICE}.cli") -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection to `url`, closed at the end.

    Raises:
        Unreachable: no connection, or it broke; with where it led.
        ConfigError: the database refuses what was asked: no such table, no privilege.
    """
    try:
        with psycopg.connect(
            url,
            autocommit=True,
            prepare_threshold=None,
            application_name=application_name,
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
        ) as conn:
            yield conn
    except psycopg.OperationalError as error:
        raise Unreachable(f"no answer from PostgreSQL at {place(url)}: {one_line(error)}") from error
    except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
        raise ConfigError(f"{place(url)} lacks a table of this service; run: {DISTRIBUTION} migrate") from error
    except psycopg.Error as error:
        raise ConfigError(f"PostgreSQL at {place(url)} refuses: {one_line(error)}") from error


def place(url: str) -> str:
    """Where a conninfo leads, for people."""
    parts = conninfo_to_dict(url)
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    return f"{host}:{parts.get('port') or 5432}/{parts.get('dbname') or parts.get('user') or ''}"


def one_line(error: Exception) -> str:
    return redact(None, "", " ".join(str(error).split())) or type(error).__name__
