"""What runs in a replica: signals, the elector's thread, a thread for each worker that leads, drain, exit codes."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

import structlog

from . import schema
from .config import Settings
from .keys import DISTRIBUTION, LeaseKey
from .lease.elector import Elector
from .lease.identity import new_instance
from .lease.journal import Journal, RoleFacts
from .lease.session import Wake
from .lease.term import LeaseLost, Term, clock
from .worker import Lease, Worker, WorkPool, run_worker

log = structlog.get_logger(__name__)

EXIT_STOPPED = 0
EXIT_WORKER_WOULD_NOT_STOP = 70
EXIT_CONFIG = 78

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """SIGTERM and SIGINT: the first asks to stop, the second ends the process at once.

    Install it before anything slow: as process 1 of a container Python would ignore a SIGTERM that comes earlier.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._pid = os.getpid()
        self.wake = Wake()

    def __enter__(self) -> "StopSignals":
        self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        # A signal that comes just before a select() interrupts nothing, measured in 9 of 40 runs; the byte that the
        # interpreter's C handler writes here does.
        self._previous_fd = signal.set_wakeup_fd(self.wake.writer_fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None or os.getpid() != self._pid:  # the second one, or in a forked child
            os._exit(128 + number)
        self.received = signal.Signals(number)


@dataclass(frozen=True)
class Facts:
    """What a replica knows of itself at one moment."""

    instance: str
    roles: list[RoleFacts]  # those that it competes for
    journal: Journal
    loop_alive: bool  # the elector's
    stopping: bool


class Supervisor:
    """Runs workers as their leases come and go.

    With no worker it stays up, so that a deployment with every toggle off is a healthy one. Start it once; `stop` may
    come before, during and after, from any thread, any number of times.
    """

    def __init__(self, settings: Settings, workers: Mapping[str, Worker]) -> None:
        fenced = {LeaseKey.of(role): worker.effects == "fenced" for role, worker in workers.items()}
        self.instance = new_instance(fenced)
        self._workers = workers
        self._timing = settings.timing
        self._drain_timeout = settings.drain_timeout_seconds
        self._settings = settings
        self._elector = Elector(
            settings.lease_url,
            self.instance,
            settings.timing,
            fenced,
            self._start,
            self._overrun,
            settings.drain_timeout_seconds,
            schema.LATEST,
        )
        self._elected = threading.Event()  # the elector's loop has ended

    def facts(self) -> Facts:
        """From any thread, at any time; takes no lock."""
        return Facts(
            instance=self.instance,
            roles=self._elector.facts(),
            journal=self._elector.journal,
            loop_alive=not self._elected.is_set(),
            stopping=self._elector.stopping,
        )

    def stop(self) -> None:
        """Ask for a clean end: workers first, then the leases."""
        self._elector.stop()

    def run(self, stop: StopSignals) -> int:
        """Run until stopped; returns the exit code."""
        if self._workers:
            log.info("service.started", instance=self.instance, roles=sorted(self._workers))
        else:
            log.info("service.idle", hint="no worker is on; see the `workers` command")
        threading.Thread(target=self._elect, args=(stop.wake,), name="elector", daemon=True).start()
        while not self._elected.is_set() and stop.received is None:
            stop.wake.wait(3600)
        if stop.received is not None:
            log.info("service.stopping", signal=stop.received.name, working=self._elector.working)
        self.stop()
        # One ttl more than the workers have, to say goodbye to a server that may not answer. No join: it would miss a
        # second signal that comes just before it, or that the kernel gives to another thread.
        until = clock() + self._drain_timeout + self._timing.ttl
        while not self._elected.is_set() and (left := until - clock()) > 0:
            stop.wake.wait(left)
        if working := self._elector.working:
            self._overrun(working[0])
        if self._elector.fatal is not None:
            print(f"{self._elector.fatal}; run: {DISTRIBUTION} migrate", file=sys.stderr)
            return EXIT_CONFIG
        log.info("service.stopped")
        return EXIT_STOPPED

    def _elect(self, done: Wake) -> None:
        try:
            self._elector.run()
        finally:
            self._elected.set()  # first: whoever wakes looks at it, and the thread itself lives a moment longer
            done.set()

    def _start(self, term: Term) -> None:
        pool = WorkPool(self._settings)  # of this term: what ended an earlier one may have broken its connections, too
        threading.Thread(target=self._work, args=(term, pool), name=f"worker-{term.key.role}", daemon=True).start()

    def _work(self, term: Term, pool: WorkPool) -> None:
        role = term.key.role
        log.info("worker.started", role=role, epoch=term.epoch)
        try:
            run_worker(self._workers[role], Lease(term, self.instance, pool, self._timing.ttl), term)
            log.warning("worker.returned", role=role, hint="run() should end only when its lease tells it to")
        except LeaseLost as reason:
            log.info("worker.stopped", role=role, reason=str(reason))
        except BaseException:
            log.exception("worker.failed", role=role)
        finally:
            term.ended.set()
            self._elector.worker_ended()
            pool.close()

    def _overrun(self, role: str) -> None:
        log.error("worker.would_not_stop", role=role, drain_timeout_seconds=self._drain_timeout)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_WORKER_WOULD_NOT_STOP)
