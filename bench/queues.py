"""The queues that are measured next to each other: this service's poller, and two job systems at stated versions.

Each has the same trivial task, which inserts one row, and as many done and waiting rows behind it as asked for.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from laboratory.environment import clean_environment
from laboratory.servers import Postgres
from laboratory.service import Fleet, Service, install

from .contestants import PEERS, bake, environment_of

QUEUE_PACKAGES = {"procrastinate": ("procrastinate==3.10.0",), "pgqueuer": ("pgqueuer==1.6.0", "asyncpg==0.32.0")}

HANDLERS = """
from .registry import handler

@handler("effect")
def effect(conn, task):
    conn.execute("insert into public.effect (task) values (%s)", [task.id])
"""


@dataclass(frozen=True)
class Queue:
    """One way to run tasks from a table.

    Args:
        fill_done, fill_waiting: statements with one parameter, how many.
        prepare: makes its tables in a fresh database.
        running: runs one worker process meanwhile, and yields its pid.
    """

    name: str
    fill_done: str
    fill_waiting: str
    prepare: Callable[[Postgres], None]
    running: Callable[[Postgres], AbstractContextManager[int]]


def ours(directory: Path) -> tuple[Queue, Path]:
    """This service's poller, with the handler above; and the interpreter of its environment."""
    project = bake(directory, "workers=poller")
    (project / "workers/poller/src/acme_billing_poller/handlers.py").write_text(HANDLERS)
    service: Service = install(project, {})

    @contextmanager
    def running(server: Postgres) -> Iterator[int]:
        with Fleet(service, server) as fleet:
            (replica,) = fleet.start(roles=("poller",), environment={})  # the default timing
            yield replica.pid
            assert replica.process.poll() is None, replica.log[-3000:]

    return Queue(
        "this service",
        "insert into acme_billing.task (kind, state, attempts, run_at, finished_at)"
        " select 'effect', 'done', 1, now() - interval '2 d', now() - interval '1 d' from generate_series(1, %s)",
        "insert into acme_billing.task (kind, payload, run_at)"
        " select 'effect', '{\"order\": 1}', now() - interval '1 h' + n * interval '1 ms'"
        " from generate_series(1, %s) as n",
        service.prepare,
        running,
    ), project / ".venv/bin/python"


def peer(directory: Path, name: str, fill_done: str, fill_waiting: str) -> Queue:
    """A job system, whose script is in `peers/`."""
    command = [environment_of(directory, name, *QUEUE_PACKAGES[name]), PEERS / f"{name}_queue.py"]

    def prepare(server: Postgres) -> None:
        environment = clean_environment(PEER_URL=server.url())
        subprocess.run([*command, "install"], env=environment, check=True, capture_output=True, timeout=60)

    @contextmanager
    def running(server: Postgres) -> Iterator[int]:
        process = subprocess.Popen(
            command,
            env=clean_environment(PEER_URL=server.url()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process.pid
            assert process.poll() is None, f"{name} has ended"
        finally:
            process.kill()
            process.wait()

    return Queue(name, fill_done, fill_waiting, prepare, running)


def peers(directory: Path) -> list[Queue]:
    return [
        peer(
            directory,
            "procrastinate",
            "insert into procrastinate_jobs (queue_name, task_name, status, attempts)"
            " select 'default', 'effect', 'succeeded', 1 from generate_series(1, %s)",
            "insert into procrastinate_jobs (queue_name, task_name)"
            " select 'default', 'effect' from generate_series(1, %s)",
        ),
        peer(
            directory,
            "pgqueuer",  # it moves what is done to its log
            "insert into pgqueuer_log (job_id, status, priority, entrypoint, aggregated)"
            " select -n, 'successful', 0, 'effect', true from generate_series(1, %s) as n",
            "insert into pgqueuer (priority, status, entrypoint)"
            " select 0, 'queued', 'effect' from generate_series(1, %s)",
        ),
    ]
