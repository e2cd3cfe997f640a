"""Commands to look at a running service and to steer it: status, doctor, verify, step-down."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from ..config import load_settings
from ..keys import DISTRIBUTION, SERVICE, LeaseKey
from .commands import EXIT_FAILED, EXIT_OK, Commands

REFRESH_SECONDS = 1.0
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def register(commands: Commands) -> None:
    role = next(iter(LeaseKey)).role
    status = commands.add(
        "status", _status, "show who leads what, since when, and who stands by", f"{DISTRIBUTION} status --watch"
    )
    status.add_argument("--watch", action="store_true", help="refresh each second until Ctrl-C")
    status.add_argument("--json", action="store_true", help="for machines; with --watch one document a line")
    doctor = commands.add(
        "doctor", _doctor, "look for what is wrong, and say what to do", f"{DISTRIBUTION} doctor --json"
    )
    doctor.add_argument("--json", action="store_true", help="for machines")
    verify = commands.add(
        "verify",
        _verify,
        "try out on the configured database that one replica leads and another takes over",
        f"{DISTRIBUTION} verify --json",
    )
    verify.add_argument("--json", action="store_true", help="for machines")
    step_down = commands.add(
        "step-down", _step_down, "ask a role's leader to let another replica lead", f"{DISTRIBUTION} step-down {role}"
    )
    step_down.add_argument("role", metavar="ROLE", help=", ".join(key.role for key in LeaseKey))
    step_down.add_argument("--wait-seconds", type=float, default=30.0, help="how long to wait for a successor (30)")


def _status(options: argparse.Namespace) -> int:
    from ..operate.database import Unreachable, database
    from ..operate.status import read_status, table

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
    from ..operate.doctor import examine

    return _tell(examine(load_settings()), options.json)


def _verify(options: argparse.Namespace) -> int:
    from .. import log
    from ..operate.verify import verify

    settings = load_settings()
    log.configure("error", settings.log_format)  # of what the replicas say, nothing but errors
    return _tell(verify(settings), options.json)


def _tell(checks: Iterable[Any], as_json: bool) -> int:
    from ..operate.doctor import Result

    told = []
    for check in checks:
        told.append(check)
        if not as_json:
            print(f"{check.result.value:<4}  {check.name}: {check.seen}", flush=True)
            if check.hint:
                print(f"      -> {check.hint} (more: {check.section})", flush=True)
    if as_json:
        print(json.dumps([{**dataclasses.asdict(check), "section": check.section} for check in told], indent=2))
    return EXIT_FAILED if any(check.result is Result.FAIL for check in told) else EXIT_OK


def _step_down(options: argparse.Namespace) -> int:
    from ..operate.database import database
    from ..operate.step_down import known_key, step_down

    known_key(options.role)
    with database(load_settings().lease_url) as conn:
        done, happened = step_down(conn, options.role, options.wait_seconds)
    print(happened)
    return EXIT_OK if done else EXIT_FAILED
