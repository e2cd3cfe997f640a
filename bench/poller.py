"""How many trivial transactional tasks a second one leader runs, and how soon it wakes: `python -m bench.poller`.

A project is generated and installed; its poller gets one handler, which writes one row. PostgreSQL runs beside it, on
the same machine, with fsync on. The queue is filled with done and with waiting tasks, one replica leads, and the
database's own clock says when each effect was written. Writes `poller.json` and `poller.md`.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from laboratory.servers import Postgres, embedded_binaries, wait_until
from laboratory.service import Fleet, Service, install

from . import TEMPLATE

BUCKET = 10_000  # tasks over which a rate is taken, to see whether it falls
WARM_UP = 5  # first wake-ups, which find a replica that still starts

HANDLERS = """
from .registry import handler

@handler("effect")
def effect(conn, task):
    conn.execute("insert into public.effect (task) values (%s)", [task.id])
"""

EFFECT = """
create table public.effect (
    id bigint generated always as identity primary key, task bigint, at timestamptz default clock_timestamp()
)
"""
FILL_DONE = """
insert into acme_billing.task (kind, state, attempts, run_at, finished_at)
select 'effect', 'done', 1, now() - interval '2 d', now() - interval '1 d' from generate_series(1, %s)
"""
FILL_WAITING = """
insert into acme_billing.task (kind, payload, run_at)
select 'effect', '{"order": 1}', now() - interval '1 h' + n * interval '1 ms' from generate_series(1, %s) as n
"""
PROGRESS = "select coalesce((select id from public.effect order by id desc limit 1), 0)"
BUCKETS = """
select count(*) / extract(epoch from max(at) - min(at))::float
from public.effect where id <= %(last)s group by (id - 1) / %(bucket)s having count(*) = %(bucket)s order by min(id)
"""
RATE = "select count(*) / extract(epoch from max(at) - min(at))::float from public.effect where id <= %s"
TWICE = "select count(*) - count(distinct task) from public.effect"
PUT = "insert into acme_billing.task (kind) values ('effect') returning id"
ANNOUNCE = "select clock_timestamp() from pg_notify('acme_billing.task', '')"
LATENCY = "select extract(epoch from at - %s)::float * 1000 from public.effect where task = %s"

STATEMENTS = "import json, acme_billing_poller.queue as q; print(json.dumps({n: getattr(q, n) for n in %r}))"
EXPLAINED = ("LOOK", "TAKE", "FINISH")


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures, on one server."""
    service = install(generate(directory), {})
    server = Postgres(directory / "postgres", embedded_binaries()).start("fsync=on")
    try:
        runs = [throughput(service, server, rows, options.measured) for rows in options.rows]
        wake_up_ms = wake_up(service, server, options.trials)
    finally:
        server.stop()
    return {
        "machine": {"cpus": os.cpu_count(), "cpu": cpu(), "load_before": options.load, "load_after": os.getloadavg()},
        "versions": {
            "postgresql": runs[0].pop("postgresql"),
            "python": platform.python_version(),
            "psycopg": psycopg.__version__,
        },
        "runs": runs,
        "wake_up_ms": wake_up_ms,
    }


def generate(directory: Path) -> Path:
    """A project whose poller has the handler above."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "cookiecutter",
        "--no-input",
        "--default-config",
        "-o",
        directory,
        TEMPLATE,
    ]
    subprocess.run([*command, "workers=poller"], check=True, capture_output=True)
    project = directory / "acme_billing"
    (project / "workers/poller/src/acme_billing_poller/handlers.py").write_text(HANDLERS)
    return project


@contextmanager
def leader(service: Service, server: Postgres) -> Iterator[None]:
    """One replica with the default timing."""
    with Fleet(service, server) as fleet:
        (replica,) = fleet.start(roles=("poller",), environment={})
        yield
        assert replica.process.poll() is None, replica.log[-3000:]


def throughput(service: Service, server: Postgres, rows: int, measured: int) -> dict[str, Any]:
    """Fill a fresh database, run `measured` of its waiting tasks, and look at the plans in the state that is left."""
    server = fresh(service, server, f"rows_{rows}")
    waiting = max(rows, measured)
    with server.connect() as conn:
        conn.execute(FILL_DONE, [rows])
        conn.execute(FILL_WAITING, [waiting])
        conn.execute("vacuum analyze acme_billing.task")
        conn.execute("checkpoint")
        with leader(service, server):
            wait_until(lambda: fetch(conn, PROGRESS) >= measured, 900, "the tasks are run")
        buckets = [rate for (rate,) in conn.execute(BUCKETS, {"last": measured, "bucket": BUCKET})]
        return {
            "postgresql": conn.info.parameter_status("server_version"),
            "done": rows,
            "waiting": waiting,
            "measured": measured,
            "tasks_per_second": round(fetch(conn, RATE, measured)),
            "rates_of_10000": [round(rate) for rate in buckets],
            "effects_twice": fetch(conn, TWICE),
            "plans": plans(service, conn),
        }


def plans(service: Service, conn: psycopg.Connection[Any]) -> dict[str, list[str]]:
    """What PostgreSQL did for each statement that the poller sends in a loop; undone afterwards."""
    python = service.project / ".venv/bin/python"
    done = subprocess.run([python, "-c", STATEMENTS % (EXPLAINED,)], check=True, capture_output=True, text=True)
    ids = [task for (task,) in conn.execute("select task from public.effect order by id desc limit 500")]
    parameters = {"kind": "effect", "limit": 500, "charge": 0, "epoch": 1, "ids": ids, "attempts": [1] * len(ids)}
    explained = {}
    for name, text in json.loads(done.stdout).items():
        with conn.transaction(force_rollback=True):
            explain = sql.SQL("explain (analyze, costs off, timing off, buffers off) ") + sql.SQL(text)
            explained[name] = [line for (line,) in conn.execute(explain, parameters)]
    return explained


def wake_up(service: Service, server: Postgres, trials: int) -> dict[str, float]:
    """Milliseconds from the announcement of a task to the effect of its handler, in an idle queue."""
    server = fresh(service, server, "idle")
    found: list[float] = []
    with server.connect() as conn, leader(service, server):
        for _ in range(trials + WARM_UP):
            task = fetch(conn, PUT)
            at = fetch(conn, ANNOUNCE)
            wait_until(lambda: conn.execute(LATENCY, [at, task]).fetchone(), 30, "it is run")  # noqa: B023
            found.append(fetch(conn, LATENCY, at, task))
            time.sleep(random.uniform(0, 0.1))  # not in step with anything
    found = sorted(found[WARM_UP:])
    summary = {"median": statistics.median(found), "p95": found[int(trials * 0.95)], "max": found[-1]}
    return {"n": trials, **{name: round(value, 1) for name, value in summary.items()}}


def fresh(service: Service, server: Postgres, name: str) -> Postgres:
    """A migrated database with a table for effects."""
    with server.connect() as conn:
        conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    subject = server.with_database(name)
    service.prepare(subject)
    with subject.connect() as conn:
        conn.execute(EFFECT)
    return subject


def fetch(conn: psycopg.Connection[Any], statement: Any, *parameters: Any) -> Any:
    row = conn.execute(statement, parameters or None).fetchone()
    assert row is not None
    return row[0]


def cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(": ")[2] if names else platform.processor()


def markdown(results: dict[str, Any]) -> str:
    machine, versions, wake = results["machine"], results["versions"], results["wake_up_ms"]
    lines = [
        "# The poller, measured",
        "",
        "One leader, one handler that inserts one row, transactional; PostgreSQL on the same machine, fsync on, other",
        "settings as they come. `python -m bench.poller` measures it again. A load above the number of cores says that",
        "other programs took a share; rates are then a lower bound.",
        "",
        f"{machine['cpus']} cores ({machine['cpu']}), load before {machine['load_before'][0]:.1f} and after"
        f" {machine['load_after'][0]:.1f}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "| done before | waiting before | tasks run | tasks/s | slowest and fastest 10,000 | effects twice |",
        "|---|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        rates = run["rates_of_10000"] or [run["tasks_per_second"]]
        lines.append(
            f"| {run['done']:,} | {run['waiting']:,} | {run['measured']:,} | {run['tasks_per_second']:,} |"
            f" {min(rates):,} to {max(rates):,} | {run['effects_twice']} |"
        )
    lines += [
        "",
        f"From NOTIFY to the effect, in an idle queue (n = {wake['n']}): median {wake['median']} ms,",
        f"95 % below {wake['p95']} ms, at most {wake['max']} ms.",
        "",
        "## Plans",
        "",
        "After the last run, so with its dead rows still there.",
    ]
    for name, plan in results["runs"][-1]["plans"].items():
        lines += ["", f"`{name}`", "", "```text", *plan, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.poller", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 1_000_000], help="done and waiting (0 1000000)")
    parser.add_argument("--measured", type=int, default=100_000, help="tasks to run of each (100000)")
    parser.add_argument("--trials", type=int, default=200, help="of the wake-up (200)")
    parser.add_argument("--out", type=Path, default=TEMPLATE / "docs", help="where to write (docs)")
    options = parser.parse_args()
    options.load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        results = measure(options, directory)
    (options.out / "poller.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "poller.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
