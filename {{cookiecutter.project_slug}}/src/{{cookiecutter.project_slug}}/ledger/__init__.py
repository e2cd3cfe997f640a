"""The ledger: each job once per period, however many replicas, restarts and retries there are.

A lock prevents overlap, not repeats. So every run is a row, and its primary key is the job and its period: the planned
time in UTC, floored by the schedule, never "now". There are three ways to use it.

In a transaction of yours, exactly once in this database: claim and effect commit together or not at all. Whoever else
claims waits for that and then is told no.

    with lease.transaction() as conn:
        if claim(conn, "invoices", period, lease):
            ...

The same with attempts: an error rolls back, is recorded, and the run is tried again later.

    run_once(lease, "invoices", period, lambda conn, run: ...)

At least once, for effects anywhere; `run.period` is the key by which the other side can tell a repeat.

    run(lease, "mailing", period, lambda run: ...)

    (no row) ──run──▶ running ──▶ succeeded
                      │  ▲  └──error──▶ retry, then failed after the last attempt
                      └──┘ its leader died: the next attempt, at once

If a leader dies in the middle, its row stays behind as running. The next leader of the role has a higher epoch, and that
alone says that nobody works on it any more: no timeout to guess. A run from outside any lease is given up when its
database session has ended. `run` and `run_once` never run a job beside another period of itself; calling them again is
how retries happen, and `unfinished` says for what.

All times are the database's. A period in the future is refused, and so is one older than MEMORY: until then the rows
are kept (the retention sweep goes by MEMORY too), so a node that was away for months cannot repeat a period.
"""

from .claims import (
    MEMORY,
    Holder,
    Refused,
    Run,
    claim,
    fail,
    finish,
    last_periods,
    lock_key,
    now,
    plan,
    skip,
    start,
    unfinished,
)
from .report import JobStatus, PastRun, history, last_runs
from .runs import ATTEMPTS, Outcome, Outside, Runner, run, run_once

__all__ = [
    "ATTEMPTS",
    "MEMORY",
    "Holder",
    "JobStatus",
    "Outcome",
    "Outside",
    "PastRun",
    "Refused",
    "Run",
    "Runner",
    "claim",
    "fail",
    "finish",
    "history",
    "last_periods",
    "last_runs",
    "lock_key",
    "now",
    "plan",
    "run",
    "run_once",
    "skip",
    "start",
    "unfinished",
]
