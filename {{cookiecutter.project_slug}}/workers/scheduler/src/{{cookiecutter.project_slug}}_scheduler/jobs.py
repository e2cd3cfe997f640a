"""Your jobs. The one below is an example."""

import psycopg
import structlog

from .job import Run, job

COUNT_SESSIONS = "select count(*) from pg_stat_activity where datname = current_database()"

log = structlog.get_logger(__name__)


@job("count_sessions", every="1m")
def count_sessions(conn: psycopg.Connection, run: Run) -> None:
    """Log how many sessions the database has."""
    for (sessions,) in conn.execute(COUNT_SESSIONS):
        log.info("sessions.counted", sessions=sessions, period=run.period.isoformat())
