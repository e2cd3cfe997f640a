"""Ask a leader to step down, and see who takes over."""

import time
from typing import Any

import psycopg

from ..config import ConfigError, nearest
from ..keys import CHANNEL, LeaseKey
from .status import RoleStatus, State, read_status

NOTIFY = "select pg_notify(%(channel)s, %(payload)s)"
LOOK_SECONDS = 0.05


def step_down(conn: psycopg.Connection[Any], role: str, patience_seconds: float) -> tuple[bool, str]:
    """Ask the leader of `role` to step down and wait until somebody leads a new term.

    Returns:
        Whether another replica took over, and what happened, for people.

    Raises:
        ConfigError: no such role.
        psycopg.Error: as the database says.
    """
    key = known_key(role)
    before = _look(conn, key)
    if before.state is not State.LEADING:
        return False, f"nobody leads {role}" + (f": {before.holder} holds its lock" if before.holder else "")
    conn.execute(NOTIFY, {"channel": CHANNEL, "payload": f"step-down {role}"})
    started = time.monotonic()
    while (now := _look(conn, key)).state is not State.LEADING or now.epoch == before.epoch:
        if time.monotonic() - started > patience_seconds:
            return False, _unfinished(role, before, now, patience_seconds)
        time.sleep(LOOK_SECONDS)
    waited = time.monotonic() - started
    if now.holder == before.holder:
        return False, f"nobody else took over {role}: {now.holder} leads it again (epoch {now.epoch})"
    return True, f"{role} is led by {now.holder} (epoch {now.epoch}), {waited:.1f} s after {before.holder} was asked"


def known_key(role: str) -> LeaseKey:
    """The key of a role that a person named.

    Raises:
        ConfigError: no such role; with the nearest one.
    """
    roles = [key.role for key in LeaseKey]
    if role not in roles:
        meant = nearest(role, roles, cutoff=0.5)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(roles)}"
        raise ConfigError(f"no role {role!r}: {hint}")
    return LeaseKey.of(role)


def _look(conn: psycopg.Connection[Any], key: LeaseKey) -> RoleStatus:
    return next(role for role in read_status(conn) if role.key == key)


def _unfinished(role: str, before: RoleStatus, now: RoleStatus, patience_seconds: float) -> str:
    if now.state is State.LEADING:
        return f"{now.holder} still leads {role} after {patience_seconds:g} s: its worker has not ended yet"
    return f"{before.holder} stepped down, and nobody leads {role} after {patience_seconds:g} s: is another replica up?"
