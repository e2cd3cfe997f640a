"""Commands that make up a deployment: run, workers, keys, migrate."""

import argparse
from typing import Any

from ..config import TOGGLE_SUFFIX, ConfigError, Settings, load_settings
from ..keys import DISTRIBUTION, ENV_PREFIX, SERVICE, LeaseKey
from .commands import EXIT_CONFIG, EXIT_OK, Commands


def register(commands: Commands) -> None:
    toggle = f"{ENV_PREFIX}{next(iter(LeaseKey)).role.upper()}{TOGGLE_SUFFIX}"
    commands.add("run", _run, "run this replica until it is told to stop", f"{toggle}=true {DISTRIBUTION} run")
    commands.add(
        "workers",
        _workers,
        "show which workers are installed and turned on (no database needed)",
        f"{DISTRIBUTION} workers",
    )
    commands.add("keys", _keys, "show the advisory-lock key of each role", f"{DISTRIBUTION} keys")
    commands.add(
        "migrate",
        _migrate,
        "bring the database schema up to this release",
        f"{DISTRIBUTION} migrate && {DISTRIBUTION} run",
    )


def _run(_: argparse.Namespace) -> int:
    from ..supervisor import StopSignals, Supervisor

    with StopSignals() as stop:
        from ..operate.beside import serving

        settings, found, workers = _checked()
        supervisor = Supervisor(settings, workers)
        with serving(settings, found, supervisor):
            return supervisor.run(stop)


def _checked() -> tuple[Settings, list[Any], dict[str, Any]]:
    """Settings, gates and open workers; whatever is wrong with all that is told at once."""
    import structlog

    from .. import gates, log

    problems: list[str] = []
    settings: Settings | None = None
    try:
        settings = load_settings()
        log.configure(settings.log_level, settings.log_format)
        _ = settings.work_url, settings.lease_url
    except ConfigError as error:
        problems.append(str(error))
    found = gates.evaluate()
    workers: dict[str, Any] = {}
    try:
        workers = gates.open_workers(found)
    except ConfigError as error:
        problems.append(str(error))
    if problems or settings is None:
        raise ConfigError("\n".join(problems))
    for gate in found:
        if gate.state is gates.State.OFF or (gate.state is gates.State.ABSENT and not workers):
            structlog.get_logger(__name__).info(f"gate.{gate.state}", role=gate.role, hint=gate.reason)
    return settings, found, workers


def _workers(_: argparse.Namespace) -> int:
    from .. import gates
    from ..operate.status import columns

    found = gates.evaluate()
    rows = [("WORKER", "INSTALLED", "TOGGLE", "RESULT")]
    rows += [(gate.role, "yes" if gate.installed else "no", gate.toggle, gate.state.value) for gate in found]
    print("\n".join(columns(rows)), end="\n\n")
    for gate in found:
        if gate.reason:
            print(f"{gate.role}: {gate.reason}")
    return EXIT_CONFIG if any(gate.state is gates.State.REFUSED for gate in found) else EXIT_OK


def _keys(_: argparse.Namespace) -> int:
    from ..operate.status import columns

    rows = [("ROLE", "KEY", "IN pg_locks"), *((key.role, str(key.value), f"objid {key.value}") for key in LeaseKey)]
    print("\n".join(columns(rows)))
    return EXIT_OK


def _migrate(_: argparse.Namespace) -> int:
    from .. import schema
    from ..operate.database import Unreachable, database

    with database(load_settings().work_url) as conn:
        try:
            applied = schema.migrate(conn)
        except schema.MigrationBusy as error:
            raise Unreachable(str(error)) from error
        found = schema.version(conn)
    for name in applied:
        print(f"applied {name}")
    print(f"the schema {SERVICE} is at version {found}" + ("" if applied else ", nothing to apply"))
    return EXIT_OK
