"""What is served beside a running replica: for the process manager, for Prometheus, and for people."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from ..config import Settings
from ..gates import Gate
from ..supervisor import Supervisor
from .endpoints import Answer, Endpoints
from .health import not_live, not_ready
from .page import page
from .picture import Camera

STOP_SECONDS = 2.0


@contextmanager
def serving(settings: Settings, gates: Sequence[Gate], supervisor: Supervisor) -> Iterator[None]:
    """Serve the endpoints in a thread of their own until the context ends, so also while workers drain."""
    if settings.ops_address is None:
        yield
        return
    endpoints = Endpoints(*settings.ops_address, paths(settings, gates, supervisor))
    thread = threading.Thread(target=endpoints.run, name="endpoints", daemon=True)
    thread.start()
    try:
        yield
    finally:
        endpoints.stop()
        thread.join(STOP_SECONDS)


def paths(settings: Settings, gates: Sequence[Gate], supervisor: Supervisor) -> dict[str, Callable[[], Answer]]:
    """Each path, and what answers it."""
    camera = Camera(settings)
    metrics: Callable[[], Answer] | None = None

    def show_metrics() -> Answer:
        nonlocal metrics
        if metrics is None:
            # at the first scrape, not at the start: the import takes longer than it takes to lead
            from .metrics import Metrics

            metrics = Metrics(supervisor.facts, gates, camera).answer
        return metrics()

    return {
        "/": lambda: page(supervisor.facts(), gates, camera.take(), datetime.now(UTC)),
        "/livez": lambda: _verdict(not_live(supervisor.facts(), settings.interval_seconds)),
        "/readyz": lambda: _verdict(not_ready(supervisor.facts())),
        "/metrics": show_metrics,
    }


def _verdict(problem: str | None) -> Answer:
    return Answer("ok\n") if problem is None else Answer(f"{problem}\n", 503)
