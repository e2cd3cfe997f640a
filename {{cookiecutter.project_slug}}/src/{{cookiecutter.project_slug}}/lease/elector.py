"""The loop: feeds `decision.py` from `session.py`, with one heartbeat for all roles each interval."""

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import psycopg
import structlog

from ..config import Timing
from ..keys import LeaseKey
from .decision import Candidacy, Doubt, Phase, Seen, Step
from .journal import Journal, RoleFacts
from .session import Refused, SchemaOutdated, Session, Wake
from .term import SESSION_ENDED, STEPPED_DOWN, STOPPING, WORKER_ENDED, Term, clock
from .watchdog import Watchdog

log = structlog.get_logger(__name__)

RECONNECT_FIRST = 0.1  # seconds; doubled with each failure in a row
RECONNECT_LAST = 2.0  # a server that comes back is found within three seconds
REFUSED_RETRY = 30.0  # seconds between looks at a pooler or server that can't carry a lease
HERD_SPREAD = 0.01  # seconds over which stand-bys spread their tries after a release


@dataclass
class _Role:
    """One role of this replica: its logic, and its term."""

    key: LeaseKey
    fenced: bool
    candidacy: Candidacy
    term: Term | None = None
    loss_reported: bool = False


class Elector:
    """Competes for all roles of this replica over one session.

    Args:
        url: conninfo of the lease's session.
        roles: each role's key, and whether all its effects are fenced.
        start: called in the elector's thread with each new term; it must start the worker and return at once. Whoever
            runs the worker sets `term.ended` and calls `worker_ended`.
        overrun: called with a role whose worker was asked to end and did not within `drain_timeout` seconds. It must
            end the process: the lease is never given back while the worker runs.
        schema_version: what `run` needs; an older database is fatal.

    Start it once. `stop` may come before, during and after, from any thread, any number of times.
    """

    def __init__(
        self,
        url: str,
        instance: str,
        timing: Timing,
        roles: Mapping[LeaseKey, bool],
        start: Callable[[Term], None],
        overrun: Callable[[str], None],
        drain_timeout: float,
        schema_version: int,
    ) -> None:
        self.fatal: SchemaOutdated | None = None
        self.journal = Journal(instance, roles)
        self._url = url
        self._instance = instance
        self._timing = timing
        self._start = start
        self._overrun = overrun
        self._drain_timeout = drain_timeout
        self._schema_version = schema_version
        self._roles = {
            key: _Role(key, fenced, Candidacy(instance, timing, fenced=fenced)) for key, fenced in roles.items()
        }
        self._wake = Wake()
        self._watchdog = Watchdog()
        self._stopping = threading.Event()
        self._timeline: int | None = None
        self._beat_at = 0.0  # when the next heartbeat is due

    # -- for other threads

    def stop(self) -> None:
        """Ask all workers to end, then release, then let `run` return."""
        self._stopping.set()
        self._wake.set()

    def worker_ended(self) -> None:
        """To be called after `term.ended` was set."""
        self._wake.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def working(self) -> list[str]:
        """The roles whose worker still runs."""
        return [r.key.role for r in self._roles.values() if r.term is not None and not r.term.ended.is_set()]

    def facts(self) -> list[RoleFacts]:
        """How each role stands in this replica."""
        return [self._facts(role, role.term, clock()) for role in self._roles.values()]

    def _facts(self, role: _Role, term: Term | None, now: float) -> RoleFacts:
        if term is not None and term.ended.is_set():
            term = None
        kill_at = role.candidacy.kill_at
        return RoleFacts(
            role=role.key.role,
            phase=role.candidacy.phase.value,
            leads=term is not None and term.held,
            epoch=role.candidacy.epoch,
            progress_age_seconds=None if term is None else max(0.0, now - term.progress_at),
            overdue_seconds=0.0 if term is None or kill_at is None else max(0.0, now - kill_at),
        )

    # -- the elector's thread

    def run(self) -> None:
        """Compete until stopped, or until the schema turns out to be too old (then `fatal` says so)."""
        failures = 0
        if not self._roles:
            self._stopping.wait()  # nothing to compete for
        while not self._finished():
            delay = 0.0
            session = None
            opened_at = clock()
            report: Callable[[], None] | None = None
            try:
                if self._stopping.is_set():
                    delay = self._timing.interval  # no new session: only see the workers end
                else:
                    session = Session.open(self._url, self._instance, self._timing, self._roles, self._schema_version)
                    self.journal.opened(session.verdict)
                    self._serve(session)
            except SchemaOutdated as error:
                self.fatal = error
                self.stop()
            except Refused as error:
                report = partial(self.journal.refused, error)
                delay = REFUSED_RETRY
            except (psycopg.Error, Doubt, OSError) as error:
                report = partial(self.journal.broken, "unreachable" if session is None else "lost", error)
                if session is not None and clock() - opened_at > 2 * self._timing.interval:
                    failures = 0  # it carried heartbeats: the next one is tried for at once
                delay = 0.0 if failures == 0 else min(RECONNECT_LAST, RECONNECT_FIRST * 2**failures)
                failures = min(failures + 1, 16)
            except Exception as error:
                report = partial(log.error, "elector.failed", exc_info=error)  # a defect: so nothing is known
                delay = RECONNECT_LAST
            if session is not None:
                session.close()
            self._cut()
            if report is not None:  # after the workers were told: a log that nobody reads may block
                report()
            self._pause(delay * random.uniform(0.5, 1.5))

    def _finished(self) -> bool:
        return self._stopping.is_set() and not self.working

    def _serve(self, session: Session) -> None:
        """Hold, try, renew, until stopped. Leaves by an exception when anything about the session is in doubt."""
        self._beat_at = clock()
        while True:
            self._reap()
            if clock() >= self._beat_at:
                self._beat_at = clock() + self._timing.interval
                self._beat(session)
            # one step, then look at the time again: on a slow network the steps of several roles outlast a trust
            if any(self._take_step(session, role) for role in self._roles.values()):
                continue
            if self._finished() and all(role.candidacy.idle for role in self._roles.values()):
                return
            due = [role.candidacy.start_at for role in self._roles.values() if role.candidacy.phase is Phase.HOLDING]
            payloads = session.wait(min([self._beat_at, *(at for at in due if at is not None)]) - clock(), self._wake)
            if payloads is None:
                self._beat_at = clock()
            self._heed(payloads or [])

    def _beat(self, session: Session) -> None:
        started = clock()
        tries = [role.key for role in self._roles.values() if role.candidacy.tries(started)]
        beat = session.heartbeat(self._roles, tries)
        ended = clock()
        self._timeline = beat.timeline
        self.journal.beat(started, ended)
        for role in self._roles.values():
            seen = beat.seen.get(role.key, Seen())
            role.candidacy.beat(started, ended, beat.timeline, seen)
            if role.term is not None and not role.term.renew(role.candidacy.trust_until):
                role.candidacy.expire()
            self.journal.saw(role.key, seen.holder)
        self._arm()

    def _take_step(self, session: Session, role: _Role) -> bool:
        """Take the step that is due for a role; whether another may be due at once."""
        candidacy = role.candidacy
        match candidacy.next(clock()):
            case Step.NOTHING:
                return False
            case Step.READ:
                candidacy.read(session.read(role.key))
                if candidacy.start_at is not None:
                    self.journal.waits(role.key, candidacy.start_at - clock())
            case Step.BEGIN:
                epoch = session.begin(role.key, self._timeline, fenced=role.fenced)
                self._heed(session.told())  # a step-down asked for before this term began was meant for another
                candidacy.begun(epoch, clock())
                if epoch is not None:
                    role.term = Term(role.key, epoch, candidacy.trust_until)
                    role.loss_reported = False
                    self._arm()
                    self.journal.acquired(role.key, epoch)
                    if self._stopping.is_set():  # asked to stop in this instant: never begin to lead
                        role.term.ended.set()
                    else:
                        self._start(role.term)
            case Step.RELEASE:
                session.release(role.key, candidacy.epoch if role.term is not None else None)
                candidacy.released()
                if role.term is not None:
                    reason = None if role.loss_reported else role.term.reason or WORKER_ENDED
                    self.journal.released(role.key, role.term.epoch, reason)
                role.term = None
        return True

    def _heed(self, payloads: Iterable[str]) -> None:
        """Heed notifications: step down, or try soon for a lock that was released."""
        roles = {role.key.role: role for role in self._roles.values()}
        for verb, _, name in (payload.partition(" ") for payload in payloads):
            role = roles.get(name)
            if role is None:
                continue
            if verb == "step-down" and role.term is not None:
                log.info("lease.step_down", role=name)
                role.candidacy.ask()
                role.term.stop(STEPPED_DOWN)
            elif verb == "released" and role.candidacy.tries(clock()):
                self._beat_at = min(self._beat_at, clock() + random.uniform(0, HERD_SPREAD))

    def _reap(self) -> None:
        """Pass on what happened since the last look: a stop request, expired terms, workers that have ended."""
        self.journal.turned_at = clock()
        for role in self._roles.values():
            if self._stopping.is_set():
                role.candidacy.close()
                if role.term is not None:
                    role.term.stop(STOPPING)
            if role.term is None:
                continue
            if not role.term.held:
                self._report_loss(role)
                role.candidacy.expire()
            if role.term.ended.is_set():
                if role.candidacy.worker_runs:
                    role.candidacy.ended(clock(), random.uniform(0.5, 1.5))
                if role.candidacy.idle:
                    role.term = None
            elif role.term.stop_asked_at is not None and clock() >= role.term.stop_asked_at + self._drain_timeout:
                self._overrun(role.key.role)
        self._arm()

    def _cut(self) -> None:
        """The session is closed: no lock is ours."""
        self.journal.cut()
        for role in self._roles.values():
            role.candidacy.cut()
            if role.term is not None:
                role.term.lose(SESSION_ENDED)
        self._reap()

    def _report_loss(self, role: _Role) -> None:
        if role.term is not None and not role.loss_reported:
            role.loss_reported = True
            self.journal.lost(role.key, role.term.epoch, role.term.reason or SESSION_ENDED)

    def _pause(self, seconds: float) -> None:
        """Without a session: see workers end, until the next attempt or until there is nothing left to do."""
        until = clock() + seconds
        while clock() < until and not self._finished():
            self._wake.wait(min(self._timing.interval, until - clock()))
            self._reap()

    def _arm(self) -> None:
        kills = [at for role in self._roles.values() if (at := role.candidacy.kill_at) is not None]
        self._watchdog.arm(kills, clock())
