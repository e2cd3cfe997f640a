"""The command sweep: the retention rules by hand. To type it is its gate: it needs the extra, but no toggle."""

import argparse

from ..config import ConfigError, load_settings
from ..keys import DISTRIBUTION
from .commands import EXIT_FAILED, EXIT_OK, Commands

ROLE = "reconciler"


def register(commands: Commands) -> None:
    sweep = commands.add(
        "sweep",
        _sweep,
        "delete now what the retention rules say, or show what would go",
        f"{DISTRIBUTION} sweep --dry-run",
    )
    sweep.add_argument("--dry-run", action="store_true", help="only show")


def _sweep(options: argparse.Namespace) -> int:
    from .. import gates, log
    from ..operate.database import database

    settings = load_settings()
    log.configure(settings.log_level, settings.log_format)
    worker = gates.load(ROLE, "sweep")
    if worker.sweep is None:
        raise ConfigError(f"the worker {ROLE} has no rules to sweep by: declare it as Worker(run, sweep=...)")
    with database(settings.work_url) as conn:
        refused = worker.sweep(conn, options.dry_run, print)
    return EXIT_FAILED if refused else EXIT_OK
