"""The command. What a subcommand needs is imported when it runs: `--help` answers at once, `run` hears its signals."""

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from .config import TOGGLE_SUFFIX, ConfigError, Settings, load_settings
from .keys import DISTRIBUTION, ENV_PREFIX, SERVICE, LeaseKey

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNREACHABLE = 75
EXIT_CONFIG = 78

REFRESH_SECONDS = 1.0
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from .operate.database import Unreachable

    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (ConfigError, Unreachable) as error:
        for line in str(error).splitlines():
            print(f"{DISTRIBUTION}: {line}", file=sys.stderr)
        return EXIT_UNREACHABLE if isinstance(error, Unreachable) else EXIT_CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # as in `status | head`; the interpreter would complain again when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(_: argparse.Namespace) -> int:
    from . import supervisor

    with supervisor.StopSignals() as stop:
        settings, workers = _checked()
        return supervisor.run(settings, workers, stop)


def _checked() -> tuple[Settings, dict[str, Any]]:
    """Settings and open workers; whatever is wrong with both is told at once."""
    import structlog

    from . import gates, log

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
    return settings, workers


def _workers(_: argparse.Namespace) -> int:
    from . import gates
    from .operate.status import columns

    found = gates.evaluate()
    rows = [("WORKER", "INSTALLED", "TOGGLE", "RESULT")]
    rows += [(gate.role, "yes" if gate.installed else "no", gate.toggle, gate.state.value) for gate in found]
    print("\n".join(columns(rows)), end="\n\n")
    for gate in found:
        if gate.reason:
            print(f"{gate.role}: {gate.reason}")
    return EXIT_CONFIG if any(gate.state is gates.State.REFUSED for gate in found) else EXIT_OK


def _keys(_: argparse.Namespace) -> int:
    from .operate.status import columns

    rows = [("ROLE", "KEY", "IN pg_locks"), *((key.role, str(key.value), f"objid {key.value}") for key in LeaseKey)]
    print("\n".join(columns(rows)))
    return EXIT_OK


def _migrate(_: argparse.Namespace) -> int:
    from . import schema
    from .operate.database import Unreachable, database

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


def _status(options: argparse.Namespace) -> int:
    from .operate.database import Unreachable, database
    from .operate.status import read_status, table

    def show(roles: list[Any]) -> None:
        if options.json:
            report = {"service": SERVICE, "checked_at": datetime.now(UTC), "roles": [*map(dataclasses.asdict, roles)]}
            print(json.dumps(report, default=datetime.isoformat, indent=None if options.watch else 2), flush=True)
        else:
            clear = CLEAR_SCREEN if options.watch and sys.stdout.isatty() else ""
            print(clear + table(roles), end="\n\n" if options.watch else "\n", flush=True)

    url = load_settings().lease_url
    while True:
        try:
            with database(url) as conn:
                show(read_status(conn))
                while options.watch:
                    time.sleep(REFRESH_SECONDS)
                    show(read_status(conn))
                return EXIT_OK
        except Unreachable as error:
            if not options.watch:
                raise
            print(error, file=sys.stderr, flush=True)
            time.sleep(REFRESH_SECONDS)
        except KeyboardInterrupt:
            return EXIT_OK


def _doctor(options: argparse.Namespace) -> int:
    from .operate.doctor import Result, examine

    checks = []
    for check in examine(load_settings()):
        checks.append(check)
        if not options.json:
            print(f"{check.result.value:<4}  {check.name}: {check.seen}", flush=True)
            if check.hint:
                print(f"      -> {check.hint}", flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    return EXIT_FAILED if any(check.result is Result.FAIL for check in checks) else EXIT_OK


def _step_down(options: argparse.Namespace) -> int:
    from .operate.database import database
    from .operate.step_down import known_key, step_down

    known_key(options.role)
    with database(load_settings().lease_url) as conn:
        done, happened = step_down(conn, options.role, options.wait_seconds)
    print(happened)
    return EXIT_OK if done else EXIT_FAILED


def _dev(options: argparse.Namespace) -> int:
    from .dev.show import show

    return show(options.replicas)


def _parser() -> argparse.ArgumentParser:
    role = next(iter(LeaseKey)).role
    toggle = f"{ENV_PREFIX}{role.upper()}{TOGGLE_SUFFIX}"
    parser = argparse.ArgumentParser(DISTRIBUTION, description="Leader-only background workers on PostgreSQL.")
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version(DISTRIBUTION)}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(command: Callable[[argparse.Namespace], int], what: str, example: str) -> argparse.ArgumentParser:
        name = command.__name__.strip("_").replace("_", "-")
        added = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.set_defaults(command=command)
        return added

    add(_run, "run this replica until it is told to stop", f"{toggle}=true {DISTRIBUTION} run")
    add(_workers, "show which workers are installed and turned on (no database needed)", f"{DISTRIBUTION} workers")
    add(_keys, "show the advisory-lock key of each role", f"{DISTRIBUTION} keys")
    add(_migrate, "bring the database schema up to this release", f"{DISTRIBUTION} migrate && {DISTRIBUTION} run")
    status = add(_status, "show who leads what, since when, and who stands by", f"{DISTRIBUTION} status --watch")
    status.add_argument("--watch", action="store_true", help="refresh each second until Ctrl-C")
    status.add_argument("--json", action="store_true", help="for machines; with --watch one document a line")
    doctor = add(_doctor, "look for what is wrong, and say what to do", f"{DISTRIBUTION} doctor --json")
    doctor.add_argument("--json", action="store_true", help="for machines")
    step_down = add(_step_down, "ask a role's leader to let another replica lead", f"{DISTRIBUTION} step-down {role}")
    step_down.add_argument("role", metavar="ROLE", help=", ".join(key.role for key in LeaseKey))
    step_down.add_argument("--wait-seconds", type=float, default=30.0, help="how long to wait for a successor (30)")
    dev = add(_dev, "show several replicas and a takeover on this machine", f"{DISTRIBUTION} dev --replicas 5")
    dev.add_argument("--replicas", type=_replicas, default=3, help="how many (3)")
    return parser


def _replicas(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 9:
        raise argparse.ArgumentTypeError("between 1 and 9")
    return number
