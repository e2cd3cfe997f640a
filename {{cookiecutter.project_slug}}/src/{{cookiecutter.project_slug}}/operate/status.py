"""Who leads what: one read-only query, so it answers from anywhere that reaches the database, for any role."""

import enum
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from ..keys import SERVICE, LeaseKey
from ..lease.identity import application_name, competes_for

PREFIX = f"{SERVICE} "  # of every lease session's application_name

# A key is below 2**32: pg_locks shows it whole in objid. In a database of its own, so another one's locks don't count.
# Without pg_read_all_stats the times and addresses of other users' sessions are null, their application_name is not.
ROLES = """
select wanted.key, lock.pid, activity.application_name as name, host(activity.client_addr) as client_address,
       extract(epoch from clock_timestamp() - activity.state_change)::float8 as heartbeat_age_seconds,
       lease.epoch, lease.holder, lease.pid as holder_pid, lease.acquired_at, lease.released_at,
       extract(epoch from clock_timestamp() - lease.acquired_at)::float8 as led_seconds
  from unnest(%(keys)s::bigint[]) with ordinality as wanted (key, position)
  left join lateral (
      select pid from pg_locks
       where locktype = 'advisory' and granted and classid = 0 and objsubid = 1 and objid::bigint = wanted.key
         and database = (select oid from pg_database where datname = current_database())
       order by mode limit 1
  ) as lock on true
  left join pg_stat_activity as activity on activity.pid = lock.pid
  left join {{cookiecutter.project_slug}}.lease on lease.key = wanted.key
 order by wanted.position
"""

SESSIONS = """
select pid, application_name from pg_stat_activity
 where datname = current_database() and starts_with(application_name, %(prefix)s)
 order by application_name
"""


class State(enum.StrEnum):
    """What is known of a role."""

    LEADING = "leading"
    WAITING = "waiting"  # its lock is held, the term has not begun: the holder waits out an unclean predecessor
    FREE = "free"  # nobody holds its lock
    COLLISION = "collision"  # another program holds its lock


@dataclass(frozen=True)
class RoleStatus:
    """One role as the database sees it; a time that may not be seen is None."""

    role: str
    key: int
    state: State
    holder: str | None  # the instance, or the application_name of a foreign program
    holder_pid: int | None  # of the PostgreSQL backend
    client_address: str | None
    epoch: int
    leading_since: datetime | None
    leading_seconds: float | None
    heartbeat_age_seconds: float | None
    last_end: str | None  # of the term before, where none is running: "clean" or "unclean"
    standbys: list[str]


def read_status(conn: psycopg.Connection[Any]) -> list[RoleStatus]:
    """The state of every role in the registry.

    Raises:
        psycopg.errors.UndefinedTable: nothing was migrated.
        psycopg.Error: as the database says.
    """
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        rows = cursor.execute(ROLES, {"keys": [key.value for key in LeaseKey]}, prepare=False).fetchall()
        sessions = cursor.execute(SESSIONS, {"prefix": PREFIX}, prepare=False).fetchall()
    return [_role_status(row, sessions) for row in rows]


def _role_status(row: Any, sessions: list[Any]) -> RoleStatus:
    if row.name is None:  # no lock, or its session ended while we looked
        state = State.FREE
    elif not row.name.startswith(PREFIX):
        state = State.COLLISION
    elif row.holder_pid == row.pid and application_name(row.holder) == row.name and row.released_at is None:
        state = State.LEADING
    else:
        state = State.WAITING
    leads = state is State.LEADING
    last_end = None if leads or not row.epoch else "unclean" if row.released_at is None else "clean"
    return RoleStatus(
        role=LeaseKey(row.key).role,
        key=row.key,
        state=state,
        # the row has the whole name, the session only 63 bytes of it
        holder=row.holder if leads else _shown(row.name),
        holder_pid=row.pid,
        client_address=row.client_address,
        epoch=row.epoch or 0,
        leading_since=row.acquired_at if leads else None,
        leading_seconds=_rounded(row.led_seconds) if leads else None,
        heartbeat_age_seconds=_rounded(row.heartbeat_age_seconds),
        last_end=last_end,
        standbys=[
            session.application_name.removeprefix(PREFIX)
            for session in sessions
            if session.pid != row.pid and competes_for(session.application_name, LeaseKey(row.key))
        ],
    )


def _shown(name: str | None) -> str | None:
    return "a program without a name" if name == "" else name and name.removeprefix(PREFIX)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 3)


def table(roles: Iterable[RoleStatus]) -> str:
    """The roles for people."""
    rows = [("ROLE", "STATE", "SINCE", "HEARTBEAT", "EPOCH", "STAND-BYS", "HOLDER")]
    notes = []
    for role in roles:
        rows.append(
            (
                role.role,
                role.state.value,
                duration(role.leading_seconds),
                "-" if role.heartbeat_age_seconds is None else f"{role.heartbeat_age_seconds:.1f}s ago",
                str(role.epoch),
                str(len(role.standbys)),
                role.holder or "nobody",
            )
        )
        notes += _notes(role)
    return "\n".join([*columns(rows), *([""] if notes else []), *notes])


def _notes(role: RoleStatus) -> list[str]:
    match role.state:
        case State.COLLISION:
            return [
                f"{role.role}: another program, {role.holder}, holds its lock {role.key} (pid {role.holder_pid}).",
                "  Give one of the two another lease key base, or a database of its own.",
            ]
        case State.WAITING:
            return [f"{role.role}: its new holder waits until the former leader must have stopped."]
        case State.FREE if not role.standbys:
            return [f"{role.role}: no replica competes for it; is its toggle on?"]
        case State.FREE if role.last_end == "unclean":
            return [f"{role.role}: nobody leads, and the last term did not end cleanly."]
    return []


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align rows; on a terminal, what would leave it is cut."""
    width = shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return [line if len(line) <= width else line[: width - 1] + "…" for line in (line.rstrip() for line in lines)]


def duration(seconds: float | None) -> str:
    """For people: two units at most."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
