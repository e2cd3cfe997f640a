"""What has run and what is to run: read-only, so it answers anywhere that reaches the database."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from .statements import HISTORY, LAST_RUNS


@dataclass(frozen=True)
class JobStatus:
    """One job: its plan, its last run, and its last success. All times are in UTC; what never was is None."""

    job: str
    schedule: str | None  # None: in the ledger, but declared by no worker
    next_period: datetime | None  # the first planned time that has not begun
    overdue_seconds: float | None  # how long ago that was; None while it is still to come
    period: datetime | None  # of the last run, whose columns follow
    state: str | None  # "running", "retry", "succeeded" or "failed"
    attempt: int | None
    instance: str | None
    started_at: datetime | None
    finished_at: datetime | None
    retry_at: datetime | None
    error: str | None
    success_period: datetime | None  # of the last run that succeeded
    success_at: datetime | None
    success_age_seconds: float | None

    def __post_init__(self) -> None:
        _to_utc(self)


@dataclass(frozen=True)
class PastRun:
    """A row of the ledger; times are in UTC."""

    period: datetime
    state: str  # "running", "retry", "succeeded", "failed" or "skipped"
    attempt: int
    role: str | None
    epoch: int | None
    instance: str | None
    started_at: datetime | None
    finished_at: datetime | None
    retry_at: datetime | None
    error: str | None
    seconds: float | None  # how long the last attempt took

    def __post_init__(self) -> None:
        _to_utc(self)


def last_runs(conn: psycopg.Connection[Any]) -> list[JobStatus]:
    """Every job that is declared or has run, by name."""
    with conn.cursor(row_factory=class_row(JobStatus)) as cursor:
        return cursor.execute(LAST_RUNS).fetchall()


def history(conn: psycopg.Connection[Any], job: str, limit: int = 20, period: datetime | None = None) -> list[PastRun]:
    """The runs of a job on record, the latest first; only that of `period` where one is given."""
    with conn.cursor(row_factory=class_row(PastRun)) as cursor:
        return cursor.execute(HISTORY, {"job": job, "limit": limit, "period": period}).fetchall()


def _to_utc(row: JobStatus | PastRun) -> None:
    """Times come in the session's time zone."""
    for name, value in vars(row).items():
        if isinstance(value, datetime):
            object.__setattr__(row, name, value.astimezone(UTC))
