"""Commands for the queue: tasks list, retry, discard. They need the table only, not the worker that runs its tasks."""

import argparse
import json
import sys
from datetime import datetime
from typing import LiteralString

from ..config import load_settings
from ..keys import DISTRIBUTION
from .commands import EXIT_FAILED, EXIT_OK, Commands

STATES = ("dead", "abandoned", "running", "retry", "waiting", "done")
EXIT_USAGE = 2  # as argparse has it


def register(commands: Commands) -> None:
    tasks = commands.group(
        "tasks", "look at the tasks of the queue, and decide about those that failed", f"{DISTRIBUTION} tasks list"
    )
    listing = tasks.add(
        "list", _list, "show tasks, the worst first", f"{DISTRIBUTION} tasks list --state dead --kind send_receipt"
    )
    listing.add_argument("--state", choices=STATES, help="only those (all but done)")
    listing.add_argument("--kind", help="only those")
    listing.add_argument("--limit", type=_limit, default=20, help="of each state at most so many (20)")
    listing.add_argument("--json", action="store_true", help="for machines, with payloads")
    for name, command, what in (
        ("retry", _retry, "run tasks now, with all their attempts if they are dead"),
        ("discard", _discard, "delete tasks that shall not run any more"),
    ):
        added = tasks.add(
            name, command, what, f"{DISTRIBUTION} tasks {name} 17 18\n  {DISTRIBUTION} tasks {name} --dead --kind mail"
        )
        added.add_argument("ids", metavar="ID", type=int, nargs="*", help="as `tasks list` shows it")
        added.add_argument("--dead", action="store_true", help="all that are dead")
        added.add_argument("--kind", help="with --dead: only those")


def _list(options: argparse.Namespace) -> int:
    from ..operate.database import database, one_line
    from ..operate.status import columns
    from ..operate.tasks import read_tasks

    states = [options.state] if options.state else [state for state in STATES if state != "done"]
    with database(load_settings().work_url) as conn:
        found = [task for state in states for task in read_tasks(conn, state, options.kind, options.limit)]
    if options.json:
        print(json.dumps(found, default=datetime.isoformat, indent=2))
        return EXIT_OK
    rows = [("ID", "KIND", "STATE", "ATTEMPTS", "RUN AT", "KEY", "ERROR")]
    for task in found:
        error = one_line(Exception(task["error"])) if task["error"] else ""
        when = f"{task['run_at']:%Y-%m-%d %H:%M:%S%z}"
        rows.append(
            (str(task["id"]), task["kind"], task["state"], str(task["attempts"]), when, task["key"] or "", error)
        )
    print("\n".join(columns(rows)) if found else "no such task")
    return EXIT_OK


def _retry(options: argparse.Namespace) -> int:
    from ..operate.tasks import RETRY

    return _decide(options, RETRY, "to be run now")


def _discard(options: argparse.Namespace) -> int:
    from ..operate.tasks import DISCARD

    return _decide(options, DISCARD, "discarded")


def _decide(options: argparse.Namespace, statement: LiteralString, done: str) -> int:
    from ..operate.database import database
    from ..operate.tasks import NotPossible, decide, decide_dead

    if bool(options.ids) == options.dead or (options.kind and not options.dead):
        print(f"{DISTRIBUTION}: give either the ids of tasks, or --dead, and --kind only with that", file=sys.stderr)
        return EXIT_USAGE
    with database(load_settings().work_url) as conn:
        try:
            if options.dead:
                number = decide_dead(conn, statement, options.kind)
            else:
                number = decide(conn, statement, options.ids)
        except NotPossible as error:
            print(f"{DISTRIBUTION}: {error}; nothing was changed", file=sys.stderr)
            return EXIT_FAILED
    print(f"{number} {'task' if number == 1 else 'tasks'} {done}")
    return EXIT_OK


def _limit(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
