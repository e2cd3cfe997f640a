"""Settings: read from the environment and `.env`, checked once, before anything starts."""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import psycopg
from dotenv import dotenv_values
from psycopg.conninfo import conninfo_to_dict
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from .keys import ENV_PREFIX

DOTENV = ".env"
TOGGLE_SUFFIX = "_ENABLED"

# What Kubernetes puts into each pod for a Service named like ours; none of it is meant as a setting.
_SERVICE_LINK = re.compile(r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)")

_ADDRESS = re.compile(r"(?P<host>\[[^\[\]\s]+\]|[^:\[\]\s]+):(?P<port>[0-9]{1,5})")


class ConfigError(Exception):
    """The configuration can't be used: the message names the setting and what to change (exit code 78)."""


@dataclass(frozen=True)
class Timing:
    """The numbers of the lease and the one rule that ties them. All in seconds.

    Counted from the start of the last good heartbeat, a leader
    stops trusting its lease after `trust`, has its process killed after `kill`, and
    `horizon` is when a successor may start. The server ends the session after `ttl` without a heartbeat.
    """

    interval: float = 1.0
    ttl: float = 6.0
    stop_grace: float = 2.0

    def __post_init__(self) -> None:
        if not 2 * self.interval < self.trust:
            raise ConfigError(
                "the lease's timing leaves no room for two missed heartbeats: 2 * interval must be less than"
                f" ttl - interval - 2 * margin - stop_grace, but 2 * {self.interval:g} >= {self.ttl:g} -"
                f" {self.interval:g} - 2 * {self.margin:g} - {self.stop_grace:g} = {self.trust:g}; raise"
                f" {ENV_PREFIX}TTL_SECONDS, or lower {ENV_PREFIX}INTERVAL_SECONDS or {ENV_PREFIX}STOP_GRACE_SECONDS"
            )

    @property
    def margin(self) -> float:
        """Spare time, once for a process to die and once for a successor to start: late wake-ups, clock rates."""
        return self.ttl / 24

    @property
    def horizon(self) -> float:
        """A successor that saw no clean release waits this long.

        It learns only at its next heartbeat, up to one interval late, that the lock is free; this much below the
        ttl, it still starts within one ttl.
        """
        return self.ttl - self.interval - self.margin

    @property
    def kill(self) -> float:
        """The process is ended this long after the last good heartbeat if its worker still runs."""
        return self.horizon - self.margin

    @property
    def trust(self) -> float:
        """The worker is told to stop this long after the last good heartbeat, and no heartbeat revives it."""
        return self.kill - self.stop_grace


class Settings(BaseSettings):
    """Every setting but the toggles. Names in the environment carry the prefix, durations their unit."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_file=DOTENV,
        extra="ignore",
        hide_input_in_errors=True,
        env_ignore_empty=True,
        frozen=True,
    )

    database_url: SecretStr | None = Field(
        default=None, description="PostgreSQL for work; a transaction pooler is fine"
    )
    lease_database_url: SecretStr | None = Field(
        default=None, description="PostgreSQL for the lease, without a transaction pooler (default: the one for work)"
    )
    interval_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="time between heartbeats")
    ttl_seconds: float = Field(
        default=6.0, gt=0, le=3600, allow_inf_nan=False, description="the server ends a silent session"
    )
    stop_grace_seconds: float = Field(
        default=2.0, ge=0, allow_inf_nan=False, description="a worker's time to stop once its lease is in doubt"
    )
    drain_timeout_seconds: float = Field(
        default=25.0, ge=0, allow_inf_nan=False, description="a worker's time to stop after SIGTERM"
    )
    # one name that is not ..._PORT: Kubernetes sets such a variable for each Service, with a URL in it
    ops_listen: str = Field(
        default="127.0.0.1:9464", description="where probes, metrics and the page are served; off: nowhere"
    )
    pool_max_size: int = Field(default=10, ge=1, le=1000, description="work connections of one leader")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: for people on a terminal, JSON elsewhere"
    )

    @field_validator("database_url", "lease_database_url")
    @classmethod
    def _is_conninfo(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        try:
            conninfo_to_dict(value.get_secret_value())
        except psycopg.ProgrammingError:
            # libpq's own words may quote a piece of the password
            raise ValueError("is no PostgreSQL URL; expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE") from None
        return value

    @field_validator("ops_listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parts = _ADDRESS.fullmatch(value)
        if value.lower() != "off" and (parts is None or int(parts["port"]) > 65535):
            raise ValueError(
                "is no HOST:PORT: write 0.0.0.0:9464 for all addresses, 127.0.0.1:0 for a free port, or off"
            )
        return value

    @property
    def ops_address(self) -> tuple[str, int] | None:
        """Host and port of the endpoints, None where they are turned off."""
        parts = _ADDRESS.fullmatch(self.ops_listen)
        return None if parts is None else (parts["host"].strip("[]"), int(parts["port"]))

    @property
    def timing(self) -> Timing:
        return Timing(self.interval_seconds, self.ttl_seconds, self.stop_grace_seconds)

    @property
    def work_url(self) -> str:
        """Conninfo for work.

        Raises:
            ConfigError: no database is configured.
        """
        if self.database_url is None:
            raise ConfigError(
                f"no database is configured: set {ENV_PREFIX}DATABASE_URL=postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
            )
        return self.database_url.get_secret_value()

    @property
    def lease_url(self) -> str:
        """Conninfo for the lease's session: direct, or through a pooler in session mode.

        Raises:
            ConfigError: no database is configured.
        """
        if self.lease_database_url is None:
            return self.work_url
        return self.lease_database_url.get_secret_value()


def environment() -> Mapping[str, str]:
    """What the process was given under our prefix, `.env` included, names in upper case without the prefix."""
    given = {**{name: value or "" for name, value in dotenv_values(DOTENV).items()}, **os.environ}
    return {
        name.upper().removeprefix(ENV_PREFIX): value
        for name, value in given.items()
        if name.upper().startswith(ENV_PREFIX)
    }


def nearest(name: str, known: list[str], *, cutoff: float = 0.7) -> str | None:
    """The known name that a misspelt one most likely meant. `cutoff`: how alike it must be, up to 1."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def load_settings() -> Settings:
    """Read and check all settings.

    Raises:
        ConfigError: one sentence for each setting that is wrong, none with its value where that is a secret.
    """
    known = [name.upper() for name in Settings.model_fields]
    for name in environment():
        if name in known or name.endswith(TOGGLE_SUFFIX) or _SERVICE_LINK.fullmatch(name):
            continue
        if (meant := nearest(name, known)) is not None:
            raise ConfigError(f"unknown setting {ENV_PREFIX}{name}: did you mean {ENV_PREFIX}{meant}?")
    try:
        settings = Settings()
    except ValidationError as error:
        raise ConfigError(
            "; ".join(
                f"{ENV_PREFIX}{str(e['loc'][0]).upper()}: {e['msg'].removeprefix('Value error, ')}"
                for e in error.errors(include_url=False, include_input=False)
            )
        ) from None
    _ = settings.timing  # the rule that ties the three numbers
    return settings
