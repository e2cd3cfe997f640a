"""How many trivial tasks a second one worker process runs, next to two job systems, and how soon ours wakes.

PostgreSQL runs beside them on the same machine, with fsync on. A database for each size is filled once and copied for
each trial, so that all trials start alike.
"""

import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from laboratory.servers import Postgres, embedded_binaries, wait_until

from .process import cpu, cpu_of_children
from .queues import Queue, ours, peers

LEAST_WAITING = 200_000  # more than anybody runs while we look
WARM_UP = 2.0  # seconds of work before the measured ones
WAKE_UP_WARM_UP = 5  # first wake-ups, which find a replica that still starts

EFFECT = """
create table public.effect (
    id bigint generated always as identity primary key, task bigint, at timestamptz default clock_timestamp()
)
"""
PROGRESS = "select coalesce((select id from public.effect order by id desc limit 1), 0)"
TWICE = "select count(*) - count(distinct task) from public.effect"
PUT = "insert into acme_billing.task (kind) values ('effect') returning id"
ANNOUNCE = "select clock_timestamp() from pg_notify('acme_billing.task', '')"
LATENCY = "select extract(epoch from at - %s)::float * 1000 from public.effect where task = %s"

STATEMENTS = "import json, acme_billing_poller.queue as q; print(json.dumps({n: getattr(q, n) for n in %r}))"
EXPLAINED = ("LOOK", "TAKE", "FINISH")


@dataclass(frozen=True)
class Throughput:
    """One queue with so many done rows, and at least as many waiting ones, behind it; one value a trial."""

    queue: str
    behind: int
    tasks_per_second: list[float]
    tasks_per_cpu_second: list[float]  # of the worker and the server together


@dataclass(frozen=True)
class Poller:
    """All that was measured of queues."""

    throughput: list[Throughput]
    wake_up_ms: list[float]  # from NOTIFY to the effect, in our idle queue
    plans: dict[str, list[str]]  # of the statements that our poller sends in a loop, with the most rows behind it


def measure(
    directory: Path,
    sizes: Sequence[int],
    trials: int,
    seconds: float,
    among: Sequence[str],
    tell: Callable[[str], None],
) -> Poller:
    """Everything on one server; `seconds` of work are looked at in each trial."""
    directory.mkdir()
    directory.chmod(0o755)
    service, python = ours(directory)
    queues = [service, *(each for each in peers(directory) if not among or each.name in among)]
    server = Postgres(directory / "postgres", embedded_binaries()).start("fsync=on")
    plans = {}
    try:
        found = []
        for behind in sizes:
            for queue in queues:
                with database(server, "filled") as filled:
                    fill(queue, filled, behind)
                    rates = [throughput(queue, server, filled, seconds) for _ in range(trials)]
                    if queue is service:
                        plans = explained(python, filled)
                found.append(Throughput(queue.name, behind, [rate for rate, _ in rates], [each for _, each in rates]))
                tell(str(found[-1]))
        return Poller(found, wake_up(service, server, trials * 40), plans)
    finally:
        server.stop()


@contextmanager
def database(server: Postgres, name: str, template: str = "template1") -> Iterator[Postgres]:
    """A database for a while."""
    with server.connect() as conn:
        names = {"name": sql.Identifier(name), "template": sql.Identifier(template)}
        conn.execute(sql.SQL("create database {name} template {template} strategy file_copy").format(**names))
        yield server.with_database(name)
        conn.execute(sql.SQL("drop database {name} with (force)").format(**names))


def fill(queue: Queue, server: Postgres, behind: int) -> None:
    queue.prepare(server)
    with server.connect() as conn:
        conn.execute(EFFECT)
        conn.execute(queue.fill_done, [behind])
        conn.execute(queue.fill_waiting, [max(behind, LEAST_WAITING)])
        conn.execute("vacuum analyze")


def throughput(queue: Queue, server: Postgres, filled: Postgres, seconds: float) -> tuple[float, float]:
    """Tasks a second, and a second of CPU, in a copy of a filled database."""
    assert server.process is not None
    with database(server, "trial", filled.database) as trial, trial.connect() as conn:
        conn.execute("checkpoint")
        with queue.running(trial) as pid:
            wait_until(lambda: fetch(conn, PROGRESS) > 0, 60, f"{queue.name} works")
            time.sleep(WARM_UP)
            before = fetch(conn, PROGRESS), cpu(pid) + cpu_of_children(server.process.pid), time.monotonic()
            time.sleep(seconds)
            after = fetch(conn, PROGRESS), cpu(pid) + cpu_of_children(server.process.pid), time.monotonic()
        done, spent, took = (b - a for a, b in zip(before, after, strict=True))
        assert fetch(conn, TWICE) == 0, f"{queue.name} ran a task twice"
        return done / took, done / spent


def explained(python: Path, server: Postgres) -> dict[str, list[str]]:
    """What PostgreSQL does for each statement that our poller sends in a loop; undone afterwards."""
    done = subprocess.run([python, "-c", STATEMENTS % (EXPLAINED,)], check=True, capture_output=True, text=True)
    plans = {}
    with server.connect() as conn:
        ids = [task for (task,) in conn.execute("select id from acme_billing.task where state = 'waiting' limit 500")]
        parameters = {"kind": "effect", "limit": 500, "charge": 0, "epoch": 1, "ids": ids, "attempts": [1] * len(ids)}
        with conn.transaction(force_rollback=True):
            for name, text in json.loads(done.stdout).items():
                explain = sql.SQL("explain (analyze, costs off, timing off, buffers off) ") + sql.SQL(text)
                plans[name] = [line for (line,) in conn.execute(explain, parameters)]
    return plans


def wake_up(service: Queue, server: Postgres, trials: int) -> list[float]:
    """Milliseconds from the announcement of a task to the effect of its handler, in an idle queue."""
    found: list[float] = []
    with database(server, "idle") as idle:
        service.prepare(idle)
        with idle.connect() as conn:
            conn.execute(EFFECT)
            with service.running(idle):
                for _ in range(trials + WAKE_UP_WARM_UP):
                    task = fetch(conn, PUT)
                    at = fetch(conn, ANNOUNCE)
                    wait_until(lambda: conn.execute(LATENCY, [at, task]).fetchone(), 30, "it is run")  # noqa: B023
                    found.append(fetch(conn, LATENCY, at, task))
                    time.sleep(random.uniform(0, 0.1))  # not in step with anything
    return found[WAKE_UP_WARM_UP:]


def fetch(conn: psycopg.Connection[Any], statement: Any, *parameters: Any) -> Any:
    row = conn.execute(statement, parameters or None).fetchone()
    assert row is not None
    return row[0]


def medians(found: Sequence[Throughput], attribute: str) -> dict[tuple[str, int], float]:
    """The median of each queue and size."""
    return {(each.queue, each.behind): statistics.median(getattr(each, attribute)) for each in found}
