"""What the database knows of the whole service, for the page and for a leader's metrics.

Read over a connection of its own that is open for a moment only, by one reader at a time and at most once in a second,
so neither a slow database nor many readers make it more than that.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import psycopg

from ..config import Settings
from ..keys import SERVICE
from ..lease.session import connect
from ..ledger import JobStatus, last_runs
from .database import one_line, place
from .status import RoleStatus, read_status

MAX_AGE = 1.0  # seconds

# The index on the period bounds it to a day, whatever is on record.
RUNS_OF_A_DAY = """
select job, state, count(*) from {{cookiecutter.project_slug}}.job_run
 where period >= clock_timestamp() - interval '1 day' group by job, state
"""


@dataclass(frozen=True)
class Picture:
    """One look; where it failed, `problem` says why and the rest is empty."""

    problem: str | None = None
    roles: list[RoleStatus] = field(default_factory=list)
    jobs: list[JobStatus] = field(default_factory=list)
    runs: list[tuple[str, str, int]] = field(default_factory=list)  # job, state and number, of the last 24 hours
    backlog: Any = None  # of the task queue, where the service has one


class Camera:
    """Takes pictures of a database."""

    def __init__(self, settings: Settings) -> None:
        self.failures = 0
        self._settings = settings
        self._backlog = _backlog()
        self._one_at_a_time = threading.Lock()
        self._taken_at = float("-inf")
        self._picture = Picture()

    def take(self) -> Picture:
        """A picture that is no older than MAX_AGE; takes five seconds at the very worst."""
        with self._one_at_a_time:
            if time.monotonic() - self._taken_at > MAX_AGE:
                self._picture = self._look()
                self._taken_at = time.monotonic()
            return self._picture

    def _look(self) -> Picture:
        settings = self._settings
        try:
            with connect(settings.lease_url, f"{SERVICE}.ops", settings.timing, read_write=False) as conn:
                return Picture(
                    roles=read_status(conn),
                    jobs=last_runs(conn),
                    runs=conn.execute(RUNS_OF_A_DAY).fetchall(),
                    backlog=self._backlog(conn) if self._backlog is not None else None,
                )
        except psycopg.Error as error:
            self.failures += 1
            return Picture(problem=f"{place(settings.lease_url)}: {one_line(error)}")


def _backlog() -> Callable[[psycopg.Connection[Any]], Any] | None:
    """The function that measures the task queue; None in a service without one."""
    name = f"{SERVICE}.task"
    return import_module(name).backlog if find_spec(name) is not None else None
