"""`job run`: one job once, from cron or a CronJob. To type it is its gate: it needs the extra, but no toggle."""

import argparse
from datetime import datetime

from ..config import ConfigError, load_settings
from ..keys import DISTRIBUTION, SERVICE
from .commands import EXIT_FAILED, EXIT_OK, Commands

ROLE = "scheduler"


def register(job: Commands) -> None:
    run = job.add(
        "run",
        _run,
        "run one job once, unless somebody else runs it or has done so",
        f"0 2 * * *  {DISTRIBUTION} job run invoices     # in the crontab of any number of machines",
    )
    run.add_argument("name", metavar="NAME", help="as in @job(NAME, ...)")
    run.add_argument(
        "--period",
        type=_time,
        help="a planned time, UTC where it has no offset, as in 2026-03-29T01:00 (the latest one)",
    )
    run.add_argument(
        "--force",
        action="store_true",
        help="one attempt, also where the ledger says that it has run, has failed, or is left behind as running",
    )


def _run(options: argparse.Namespace) -> int:
    from .. import gates, log
    from ..lease.identity import application_name, new_instance
    from ..ledger import Outside
    from ..operate.database import database

    settings = load_settings()
    log.configure(settings.log_level, settings.log_format)
    worker = gates.load(ROLE, f"{DISTRIBUTION} job run {options.name}")
    if worker.run_job is None:
        raise ConfigError(f"the worker {ROLE} has no jobs: write Worker(..., run_job=run_job)")
    name = application_name(new_instance([]))
    with database(settings.work_url) as work, database(settings.lease_url, name) as session:
        outside = Outside(work, session, name.removeprefix(f"{SERVICE} "))
        try:
            done, happened = worker.run_job(outside, options.name, options.period, options.force)
        except ValueError as error:  # of the name, the period, or a session that can't carry a lock; never of the job
            raise ConfigError(str(error)) from error
    print(happened)
    return EXIT_OK if done else EXIT_FAILED


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as in 2026-03-29T01:00") from None
