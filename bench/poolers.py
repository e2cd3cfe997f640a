"""Who leads twice through PgBouncer in transaction mode, idle and with light traffic beside it."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from laboratory.servers import PgBouncer
from laboratory.traffic import traffic

from . import spans
from .contestants import Contestant, end
from .failover import REPLICAS, stage

WATCHED = 40.0  # seconds; the slowest of them holds its first election after 25


@dataclass(frozen=True)
class Pooled:
    """What three replicas did behind a transaction pooler."""

    contestant: str
    busy: bool  # with light traffic of others beside them
    worked: float  # seconds of work, of `watched`
    several: float  # seconds in which two or more worked
    watched: float
    told: str  # what the log says of it, if anything


def run(contestant: Contestant, *, busy: bool) -> list[Pooled]:
    with stage(contestant, replicas=0) as here, ExitStack() as stack:
        bouncer = PgBouncer(here.directory.parent / "pgbouncer", here.postgres, "transaction", 20).start()
        stack.callback(bouncer.stop)
        if busy:
            stack.enter_context(traffic(here.postgres, bouncer, 3, "-R", "60"))
        at = time.monotonic()
        replicas = [contestant.start(bouncer.url(), here.directory, number) for number in range(REPLICAS)]
        stack.callback(end, replicas)
        time.sleep(WATCHED)
        until = time.monotonic()
        logs = "".join(replica.log for replica in replicas)
        told = "refused, names the setting" if "session.refused" in logs else "errors" if "Error" in logs else "nothing"
        found = []
        for role, name in contestant.roles.items():
            nobody, several = spans.seconds(here.spans(role), at, until)
            found.append(Pooled(name, busy, until - at - nobody, several, until - at, told))
        return found


def measure(contestants: Sequence[Contestant], at_once: int) -> list[Pooled]:
    """All of them, some at a time."""
    jobs = [(contestant, busy) for contestant in contestants for busy in (False, True)]
    with ThreadPoolExecutor(at_once) as pool:
        return [result for found in pool.map(lambda job: run(job[0], busy=job[1]), jobs) for result in found]
