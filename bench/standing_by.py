"""What stand-bys cost the server: statements, connections, its CPU and memory, and the time of one heartbeat."""

import time
from dataclasses import dataclass

from laboratory.servers import wait_until

from .contestants import Contestant, end
from .failover import Stage, stage
from .process import cpu, memory

SETTINGS = ("max_connections=400", "shared_buffers=128MB")
BACKENDS = (
    "select pid from pg_stat_activity where datname = current_database() and application_name like 'acme_billing %'"
)
COMMITS = "select xact_commit from pg_stat_database where datname = current_database()"


@dataclass(frozen=True)
class StandingBy:
    """A leader and so many stand-bys, each with three roles, watched for a while."""

    standbys: int
    statements_per_second: float  # of all together, while the leader's workers send none
    connections: int
    cpu_percent: float  # of one core, of all their backends together
    backend_mib: float  # share of memory (PSS) of one backend


def count(here: Stage, seconds: float) -> tuple[float, list[int]]:
    """Statements a second, each in autocommit, and the backends of all lease sessions."""
    with here.postgres.connect() as conn:

        def commits() -> int:
            conn.execute("select pg_stat_clear_snapshot()")
            row = conn.execute(COMMITS).fetchone()
            assert row is not None
            return int(row[0])

        pids = [int(row[0]) for row in conn.execute(BACKENDS).fetchall()]
        first = commits()
        time.sleep(seconds)
        return (commits() - first) / seconds, pids


def measure(service: Contestant, numbers: list[int], seconds: float = 20) -> list[StandingBy]:
    found = []
    with stage(service, replicas=0, settings=SETTINGS) as here:
        (here.directory / "quiet").touch()  # the leader's worker sends no statements
        try:
            for number in numbers:
                while len(here.replicas) < number + 1:
                    here.replicas.append(service.start(here.url, here.directory, len(here.replicas)))
                    if (
                        len(here.replicas) % 4 == 0
                    ):  # not all at once: starting is work for this machine, not the server
                        ready(here)
                ready(here)
                _, pids = count(here, 0.1)
                before = sum(map(cpu, pids))
                statements, pids = count(here, seconds)
                percent = (sum(map(cpu, pids)) - before) / seconds * 100
                mib = sum(memory(pid, "Pss") for pid in pids) / len(pids)
                found.append(StandingBy(number, statements, len(pids), percent, mib))
        finally:
            end(here.replicas)
    return found


def ready(here: Stage) -> None:
    """Until each has a session."""

    def all_connected() -> bool:
        with here.postgres.connect() as conn:
            return len(conn.execute(BACKENDS).fetchall()) == len(here.replicas)

    wait_until(all_connected, 60, "each replica has its session")
