"""The poller as it is generated, under SIGKILL: each task is done, inside the database once, outside at least once."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laboratory.servers import Postgres, wait_until
from laboratory.service import Fleet, Replica, Service, install

from .conftest import fresh

pytestmark = pytest.mark.slow

SHORT = {"INTERVAL_SECONDS": "0.2", "TTL_SECONDS": "1.5", "STOP_GRACE_SECONDS": "0.3"}
INSIDE, OUTSIDE, KILLS = 8000, 2000, 8

#: `hold` is a file: while it is there, a handler waits between its effect and the end of its task.
HANDLERS = """
import os
import signal
import time
from pathlib import Path

from .registry import handler

DIRECTORY = Path(os.environ["RECORD_DIRECTORY"])


def hold(task):
    if task.payload:
        (DIRECTORY / "begun").touch()
        while (DIRECTORY / "hold").exists():
            time.sleep(0.005)


@handler("inside")
def inside(conn, task):
    conn.execute("insert into public.effect (task) values (%s)", [task.id])
    time.sleep(0.0005)
    hold(task)


@handler("outside", transactional=False, concurrency=8)
def outside(lease, task):
    with (DIRECTORY / f"{os.getpid()}.outside").open("a") as file:
        file.write(f"{task.id}\\n")
    hold(task)


@handler("deadly", max_attempts=3)
def deadly(conn, task):
    if task.payload:
        os.kill(os.getpid(), signal.SIGKILL)


@handler("deadly_outside", max_attempts=3, transactional=False)
def deadly_outside(lease, task):
    deadly(None, task)
"""

PUT = "insert into acme_billing.task (kind, payload) select %s, %s::jsonb from generate_series(1, %s)"
LEADER = "select epoch, holder from acme_billing.lease where role = 'poller' and holder is not null"
STATES = "select kind, state, attempts from acme_billing.task order by id"
#: How long an attempt is put off is the matter of other tests.
HURRY = """
with hurried as (update acme_billing.task set run_at = now() where run_at > now() returning id)
select pg_notify('acme_billing.task', '') from hurried
"""
UNDONE = "select count(*) from acme_billing.task where state <> 'done'"
EFFECTS = "select task, count(*) from public.effect group by task"


@pytest.fixture(scope="module")
def queue_service(bake: Callable[..., Path]) -> Service:
    """A project with the poller that users get, and the handlers above."""
    project = bake(workers="poller")
    (project / "workers/poller/src/acme_billing_poller/handlers.py").write_text(HANDLERS)
    return install(project, {})


@pytest.fixture
def queue(postgres_18: Postgres, queue_service: Service) -> Iterator[Fleet]:
    """No replica yet."""
    postgres = fresh(postgres_18, queue_service)
    with postgres.connect() as conn:
        conn.execute("create table public.effect (task bigint)")
    with Fleet(queue_service, postgres) as fleet:
        yield fleet


def put(queue: Fleet, kind: str, payload: str = "{}", number: int = 1) -> None:
    with queue.postgres.connect() as conn:
        conn.execute(PUT, [kind, payload, number])


def states(queue: Fleet) -> list[tuple[str, str, int]]:
    with queue.postgres.connect() as conn:
        return conn.execute(STATES).fetchall()


def effects(queue: Fleet) -> tuple[Counter[int], Counter[int]]:
    """How often each task had its effect, inside and outside of the database."""
    with queue.postgres.connect() as conn:
        inside = Counter(dict(conn.execute(EFFECTS).fetchall()))
    files = queue.directory.glob("*.outside")
    return inside, Counter(int(line) for file in files for line in file.read_text().splitlines())


def start(queue: Fleet, count: int = 1) -> list[Replica]:
    return queue.start(count, roles=("poller",), environment=SHORT)


def leader(queue: Fleet, after: int) -> tuple[int, Replica] | None:
    """Who leads in a term later than `after`, and lives."""
    with queue.postgres.connect() as conn:
        row = conn.execute(LEADER).fetchone()
    if row is None or row[0] <= after:
        return None
    pid = int(row[1].partition("-")[0])
    return next(((row[0], replica) for replica in queue.alive() if replica.pid == pid), None)


def test_ten_thousand_tasks_are_each_done_while_a_leader_is_killed_every_second(
    queue: Fleet, record_property: Callable[[str, object], None]
) -> None:
    put(queue, "inside", number=INSIDE)
    put(queue, "outside", number=OUTSIDE)
    start(queue, 3)
    epoch = 0
    for _ in range(KILLS):
        epoch, victim = wait_until(lambda: leader(queue, epoch), 20, lambda: f"somebody leads: {queue.logs()[-4000:]}")  # noqa: B023
        time.sleep(1)  # what is tested: a leader has that long
        victim.signal(signal.SIGKILL)
        victim.process.wait()
        start(queue)
    with queue.postgres.connect() as conn:
        assert conn.execute(UNDONE).fetchone() != (0,), "the leaders were killed in the middle of their work"
        wait_until(
            lambda: conn.execute(UNDONE).fetchone() == (0,), 120, lambda: f"all are done: {queue.logs()[-4000:]}"
        )
    inside, outside = effects(queue)
    assert (len(inside), set(inside.values())) == (INSIDE, {1})
    assert (len(outside), min(outside.values())) == (OUTSIDE, 1)
    repeated = sum(outside.values()) - OUTSIDE
    record_property("outside effects that were repeated", repeated)
    print(f"{KILLS} leaders killed; of {OUTSIDE} outside effects {repeated} were repeated")
    assert set(queue.stop()[-3:]) <= {0, -signal.SIGKILL}


def test_killed_between_effect_and_removal_a_task_is_done_once_inside_and_again_outside(queue: Fleet) -> None:
    for kind in ("inside", "outside"):
        (queue.directory / "hold").touch()
        (queue.directory / "begun").unlink(missing_ok=True)
        put(queue, kind, '{"hold": true}')
        (replica,) = start(queue)
        wait_until((queue.directory / "begun").exists, 30, lambda: f"its handler has begun: {queue.logs()[-4000:]}")
        replica.signal(signal.SIGKILL)
        replica.process.wait()
        (queue.directory / "hold").unlink()
        (successor,) = start(queue)
        wait_until(lambda: states(queue)[-1][1] == "done", 30, lambda: f"it is done: {queue.logs()[-4000:]}")
        successor.signal(signal.SIGTERM)
        assert successor.process.wait(30) == 0
    assert states(queue) == [("inside", "done", 1), ("outside", "done", 2)]
    assert effects(queue) == (Counter({1: 1}), Counter({2: 2}))


@pytest.mark.parametrize("kind", ["deadly", "deadly_outside"])
def test_a_task_that_kills_its_process_dies_alone_after_its_attempts(queue: Fleet, kind: str) -> None:
    put(queue, kind, number=3)
    put(queue, kind, '{"kill": true}')
    put(queue, kind, number=3)

    def settled() -> bool:
        if not queue.alive():
            start(queue)
        with queue.postgres.connect() as conn:
            conn.execute(HURRY)
        return {state for _, state, _ in states(queue)} <= {"done", "dead"}

    wait_until(settled, 60, lambda: f"all are settled: {states(queue)} {queue.logs()[-4000:]}")
    found = states(queue)
    assert found.pop(3) == (kind, "dead", 3)
    assert {state for _, state, _ in found} == {"done"}
    died = [replica for replica in queue.replicas if replica.process.poll() == -signal.SIGKILL]
    assert len(died) == (4 if kind == "deadly" else 3), "in its batch, if it has one, and each time that it ran alone"
    assert queue.stop()[-1] == 0
