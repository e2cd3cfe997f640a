"""What Prometheus reads: each replica's own facts, and what the database knows of jobs and tasks.

The latter is told only by a replica that leads: so at most as many read it as there are roles, however many replicas
there are. Take the maximum of it, not the sum.

A worker's own metrics need nothing from here: whatever it makes with `prometheus_client` is shown beside these.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..gates import Gate
from ..keys import DISTRIBUTION, SERVICE
from ..lease.journal import HEARTBEAT_BOUNDS
from ..lease.term import clock
from ..supervisor import Facts
from .endpoints import Answer
from .picture import Camera, Picture

BOUNDS = [*map(str, HEARTBEAT_BOUNDS), "+Inf"]


class Metrics(Collector):
    """A page of metrics.

    Args:
        facts: of this replica.
        gates: the build, told once.
        camera: of the database.
    """

    def __init__(self, facts: Callable[[], Facts], gates: Iterable[Gate], camera: Camera) -> None:
        self._facts = facts
        self._camera = camera
        self._extras = ",".join(sorted(gate.role for gate in gates if gate.installed))
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answer(self) -> Answer:
        body = generate_latest(REGISTRY) + generate_latest(self._registry)
        return Answer(body.decode(), content_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        facts = self._facts()
        yield _gauge("build_info", "1; with the release and the extras that are installed", ("version", "extras"), [
            ((version(DISTRIBUTION), self._extras), 1.0),
        ])  # fmt: skip
        yield from _session(facts)
        yield from _roles(facts)
        if any(role.leads for role in facts.roles):
            yield from _database(self._camera.take())
        yield _counter("database_read_failures", "reads for these figures or the page that failed", (), [
            ((), self._camera.failures),
        ])  # fmt: skip


def _session(facts: Facts) -> Iterator[Metric]:
    journal = facts.journal
    open_now = journal.connection == "open"
    yield _gauge("session_open", "whether the session of the lease is open", (), [((), float(open_now))])
    yield _counter(
        "session_refusals", "looks at the database that ended in a refusal to lead", ("verdict",),
        [((verdict,), count) for verdict, count in journal.refusals.copy().items()],
    )  # fmt: skip
    heartbeats = HistogramMetricFamily(f"{SERVICE}_lease_heartbeat_seconds", "how long a heartbeat took")
    counts = list(accumulate(journal.heartbeats))
    heartbeats.add_metric([], list(zip(BOUNDS, map(float, counts), strict=True)), journal.heartbeat_seconds)
    yield heartbeats
    if journal.heartbeat_at is not None:
        age = max(0.0, clock() - journal.heartbeat_at)
        yield _gauge("lease_heartbeat_age_seconds", "since the last good heartbeat began", (), [((), age)])


def _roles(facts: Facts) -> Iterator[Metric]:
    journal, roles = facts.journal, facts.roles

    def gauge(name: str, what: str, values: Iterable[tuple[str, float]]) -> Metric:
        return _gauge(name, what, ("role",), [((role,), value) for role, value in values])

    yield gauge("lease_leader", "whether this replica leads", [(role.role, float(role.leads)) for role in roles])
    yield gauge(
        "lease_epoch", "of this replica's last term; 0 before the first", [(role.role, role.epoch) for role in roles]
    )
    yield _counter(
        "lease_transitions", "terms that began here (acquired) and ended here (all other reasons)", ("role", "reason"),
        [(labels, count) for labels, count in journal.transitions.copy().items()],
    )  # fmt: skip
    yield gauge(
        "lease_takeover_wait_seconds",
        "how long this replica waited for its predecessor, when it last won the lock",
        journal.takeover_wait_seconds.copy().items(),
    )
    collisions = [(role, float(holder is not None)) for role, holder in journal.collisions.copy().items()]
    yield gauge("lease_collision", "whether another program holds the lock of the role", collisions)
    ages = [(role.role, role.progress_age_seconds) for role in roles]
    yield gauge(
        "worker_progress_age_seconds",
        "since the worker that runs here last waited or checked",
        [(role, age) for role, age in ages if age is not None],
    )


def _database(picture: Picture) -> Iterator[Metric]:
    # not "job": Prometheus gives each sample a label of that name, and would rename ours
    if picture.problem is not None:
        return
    yield _gauge(
        "job_runs", "periods of the last 24 hours on record, by how their runs went", ("job_name", "state"),
        [((job, state), count) for job, state, count in picture.runs],
    )  # fmt: skip
    yield _gauge(
        "job_last_success_timestamp_seconds", "when the last run that succeeded had ended", ("job_name",),
        [((job.job,), job.success_at.timestamp()) for job in picture.jobs if job.success_at is not None],
    )  # fmt: skip
    yield _gauge(
        "job_overdue_seconds", "for how long the next planned run has been due and has not begun", ("job_name",),
        [((job.job,), job.overdue_seconds or 0.0) for job in picture.jobs if job.next_period is not None],
    )  # fmt: skip
    if (queue := picture.backlog) is not None:
        yield _gauge("tasks", "by state: due and waiting, running, dead", ("state",), [
            (("waiting",), queue.waiting), (("running",), queue.running), (("dead",), queue.dead),
        ])  # fmt: skip
        oldest = queue.oldest.total_seconds()
        yield _gauge("tasks_oldest_age_seconds", "for how long the first task that waits has been due", (), [
            ((), oldest),
        ])  # fmt: skip


Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, what: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = GaugeMetricFamily(f"{SERVICE}_{name}", what, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, what: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = CounterMetricFamily(f"{SERVICE}_{name}", what, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
