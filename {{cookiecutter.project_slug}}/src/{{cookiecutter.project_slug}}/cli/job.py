"""Commands about jobs: job list, job history. They read tables only, so they work in every installation."""

import argparse
import dataclasses
import json
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec

from ..config import ConfigError, load_settings, nearest
from ..keys import DISTRIBUTION
from .commands import EXIT_OK, Commands


def register(commands: Commands) -> None:
    job = commands.group("job", "look at jobs and what they did", f"{DISTRIBUTION} job list")
    listing = job.add(
        "list", _list, "show each job's plan, its last run and its last success", f"{DISTRIBUTION} job list"
    )
    history = job.add(
        "history", _history, "show a job's latest runs", f"{DISTRIBUTION} job history invoices --limit 50"
    )
    history.add_argument("name", metavar="NAME", help="see `job list`")
    history.add_argument("--limit", type=_limit, default=20, help="how many (20)")
    for command in (listing, history):
        command.add_argument("--json", action="store_true", help="for machines; times in UTC")
    if find_spec(".job_run", __package__) is not None:  # there only with the worker that has jobs
        import_module(".job_run", __package__).register(job)


def _list(options: argparse.Namespace) -> int:
    from .. import ledger
    from ..operate.database import database
    from ..operate.status import columns, duration

    with database(load_settings().work_url) as conn:
        jobs = ledger.last_runs(conn)
    if options.json:
        print(json.dumps([dataclasses.asdict(job) for job in jobs], default=datetime.isoformat, indent=2))
        return EXIT_OK
    rows = [("JOB", "STATE", "LAST RUN", "LAST SUCCESS", "NEXT", "ATTEMPT", "SCHEDULE", "ERROR")]
    for job in jobs:
        overdue = f" (overdue {duration(job.overdue_seconds)})" if job.overdue_seconds else ""
        success = "-" if job.success_age_seconds is None else f"{duration(job.success_age_seconds)} ago"
        facts = (
            job.state or "-",
            _time(job.period),
            success,
            _time(job.next_period) + overdue,
            str(job.attempt or "-"),
        )
        rows.append((job.job, *facts, job.schedule or "-", _error(job.error, job.state)))
    print("\n".join(columns(rows)) if jobs else "no job is declared, and none has run")
    return EXIT_OK


def _history(options: argparse.Namespace) -> int:
    from .. import ledger
    from ..operate.database import database
    from ..operate.status import columns, duration

    with database(load_settings().work_url) as conn:
        runs = ledger.history(conn, options.name, options.limit)
        known = [] if runs else [job.job for job in ledger.last_runs(conn)]
    if not runs and options.name not in known:
        meant = nearest(options.name, known)
        hint = f"did you mean {meant}?" if meant else f"known are {', '.join(known)}" if known else "nor has any other"
        raise ConfigError(f"no job {options.name!r} has run or is declared: {hint}")
    if options.json:
        print(json.dumps([dataclasses.asdict(run) for run in runs], default=datetime.isoformat, indent=2))
        return EXIT_OK
    rows = [("PERIOD", "STATE", "ATTEMPT", "STARTED", "TOOK", "BY", "ERROR")]
    for run in runs:
        took = "-" if run.seconds is None else f"{run.seconds:.1f}s" if run.seconds < 60 else duration(run.seconds)
        facts = (str(run.attempt or "-"), _time(run.started_at), took, run.instance or "-")
        rows.append((_time(run.period), run.state, *facts, _error(run.error, run.state)))
    print("\n".join(columns(rows)))
    return EXIT_OK


def _time(time: datetime | None) -> str:
    return "-" if time is None else f"{time:%Y-%m-%dT%H:%M:%SZ}"


def _error(error: str | None, state: str | None) -> str:
    """The first line of the last attempt's; after a success it is that of an earlier one, and history."""
    return error.partition("\n")[0] if error and state in ("failed", "retry") else "-"


def _limit(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("a number of runs, at least 1")
    return int(text)
