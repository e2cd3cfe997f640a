"""Thousands of interleavings of the lease's pure logic against a model of the server, without a database.

Two replicas with different timings compete for one role. Everything that takes time is cut into steps, between which
time passes and anything else may happen: a heartbeat is sent, executed, answered. Sessions are ended by the server
after their ttl, or at any moment; processes die; the server fails over and may lose the last change of the row. A
worker is as stubborn as can be: it runs until the kill timer ends its process, unless the model ends it earlier.
"""

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

REPLICAS = 2


@dataclass
class Session:
    """The server's side of one session."""

    pid: int
    ttl: float
    last_statement: float
    alive: bool = True


@dataclass
class Replica:
    """One process."""

    candidacy: Any
    timing: Any
    instance: str
    session: Session | None = None  # what the process believes to have
    beat: dict[str, Any] | None = None  # a heartbeat on its way
    begin: tuple[int] | None = None  # an answer to BEGIN on its way


@dataclass
class Server:
    """One PostgreSQL: the lock, the row, its timeline."""

    row: Any
    timeline: int = 1
    holder: Session | None = None
    lost_rows: list[Any] = field(default_factory=list)  # what a fail-over may go back to


def machine(decision: Any, config: Any, *, fenced: bool) -> type[RuleBasedStateMachine]:
    """The state machine over a project's own `decision` and `config` modules."""
    timings = [
        config.Timing(interval=1.0, ttl=6.0, stop_grace=2.0),
        config.Timing(interval=0.25, ttl=1.5, stop_grace=0.5),
        config.Timing(interval=2.0, ttl=20.0, stop_grace=5.0),
    ]
    moments = st.one_of(st.sampled_from([0.25, 0.5, 1.0, 2.5]), st.floats(0, 25))

    class Lease(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.now = 1000.0
            self.serial = itertools.count(1)
            empty = decision.Row(
                epoch=0, holder=None, pid=None, trust=None, horizon=None, fenced=False, timeline=1, released=True
            )
            self.server = Server(empty)
            self.replicas: list[Replica] = []
            self.begun: list[int] = []  # epochs in the order in which terms began

        @initialize(picks=st.lists(st.sampled_from(timings), min_size=REPLICAS, max_size=REPLICAS))
        def start(self, picks: list[Any]) -> None:
            self.replicas = [self.process(timing) for timing in picks]

        def process(self, timing: Any) -> Replica:
            instance = f"i{next(self.serial)}"
            return Replica(decision.Candidacy(instance, timing, fenced=fenced), timing, instance)

        # -- time, and what it does

        @rule(seconds=moments)
        def pass_time(self, seconds: float) -> None:
            until = self.now + seconds
            while True:
                due = [(at, index) for index, r in enumerate(self.replicas) if (at := r.candidacy.kill_at) is not None]
                at, index = min(due, default=(math.inf, -1))
                if at > until:
                    break
                self.now = max(self.now, at)
                self.die(index)
            self.now = until
            holder = self.server.holder
            for session in {id(s): s for r in self.replicas if (s := r.session)}.values():
                if session.alive and self.now >= session.last_statement + session.ttl:
                    self.end(session)
            if holder is not None and self.now >= holder.last_statement + holder.ttl:
                self.end(holder)

        def end(self, session: Session) -> None:
            session.alive = False
            if self.server.holder is session:
                self.server.holder = None

        def die(self, index: int) -> None:
            replica = self.replicas[index]
            if replica.session is not None:
                self.end(replica.session)
            self.replicas[index] = self.process(replica.timing)

        # -- faults

        @rule(index=st.integers(0, REPLICAS - 1), how=st.sampled_from(["process dies", "server ends it", "noticed"]))
        def lose_session(self, index: int, how: str) -> None:
            replica = self.replicas[index]
            if how == "process dies":
                self.die(index)
            elif replica.session is not None:
                self.end(replica.session)
                if how == "noticed":
                    self.cut(replica)

        @rule(loses_last=st.booleans())
        def fail_over(self, loses_last: bool) -> None:
            for replica in self.replicas:
                if replica.session is not None:
                    self.end(replica.session)
            row = self.server.row
            # with it goes the predecessor's promise, so releases with different timings are not covered then
            alike = len({replica.timing for replica in self.replicas}) == 1
            if loses_last and alike and self.server.lost_rows:
                row = self.server.lost_rows[-1]
            self.server = Server(row, self.server.timeline + 1)

        def cut(self, replica: Replica) -> None:
            replica.session = replica.beat = replica.begin = None
            replica.candidacy.cut()

        # -- one replica's loop, in steps

        @rule(index=st.integers(0, REPLICAS - 1))
        def send_heartbeat(self, index: int) -> None:
            replica = self.replicas[index]
            if replica.session is None:
                replica.session = Session(next(self.serial), replica.timing.ttl, self.now)
            if replica.beat is None and replica.begin is None:
                replica.beat = {"started": self.now, "tries": replica.candidacy.tries(self.now)}

        @rule(index=st.integers(0, REPLICAS - 1))
        def execute_heartbeat(self, index: int) -> None:
            replica = self.replicas[index]
            session, beat, server = replica.session, replica.beat, self.server
            if session is None or beat is None or "seen" in beat or not session.alive:
                return
            session.last_statement = self.now
            holder, held, won = None, server.holder is session, False
            if server.holder is not None and not held:
                heard = server.holder.last_statement
                holder = decision.Holder(server.holder.pid, "x", server.row.epoch, heard)
            elif server.holder is None and beat["tries"]:
                server.holder, won = session, True
            beat["seen"] = decision.Seen(held=held, won=won, holder=holder)
            beat["timeline"] = server.timeline

        @rule(index=st.integers(0, REPLICAS - 1))
        def answer_heartbeat(self, index: int) -> None:
            replica = self.replicas[index]
            if replica.beat is None or "seen" not in replica.beat:
                return
            beat, replica.beat = replica.beat, None
            try:
                replica.candidacy.beat(beat["started"], self.now, beat["timeline"], beat["seen"])
            except decision.Doubt:
                assert replica.session is not None
                self.end(replica.session)
                self.cut(replica)

        @rule(index=st.integers(0, REPLICAS - 1))
        def heartbeat(self, index: int) -> None:
            self.send_heartbeat(index)
            self.execute_heartbeat(index)
            self.answer_heartbeat(index)
            self.step(index)
            self.step(index)
            self.answer_begin(index)

        def begin_as_early_as_allowed(self, index: int) -> None:
            """A patient replica: it holds the lock, heartbeats each interval, and begins the instant it may."""
            replica = self.replicas[index]
            while (at := replica.candidacy.start_at) is not None and replica.candidacy.phase is decision.Phase.HOLDING:
                self.pass_time(min(replica.timing.interval, max(0.0, at - self.now)))
                if self.replicas[index] is not replica or replica.session is None or not replica.session.alive:
                    return
                begins = self.now >= at
                self.heartbeat(index)
                if begins:
                    return

        @rule(index=st.integers(0, REPLICAS - 1), answered_late=st.booleans())
        def end_of_the_holders_session(self, index: int, answered_late: bool) -> None:
            """Whoever holds the lock loses its session, perhaps with an answer on its way, and a replica succeeds."""
            holders = [i for i, r in enumerate(self.replicas) if r.session and r.session is self.server.holder]
            for holder in holders:
                if answered_late:
                    self.execute_heartbeat(holder)
                self.end(self.replicas[holder].session)  # type: ignore[arg-type]
                if answered_late:
                    self.answer_heartbeat(holder)
            self.heartbeat(index)
            self.begin_as_early_as_allowed(index)

        @rule(first=st.integers(0, REPLICAS - 1), share=st.sampled_from([0.1, 0.5, 0.9]))
        def live(self, first: int, share: float) -> None:
            """An interval of ordinary life: each sends its heartbeat, one after the other."""
            interval = self.replicas[first].timing.interval
            self.heartbeat(first)
            self.pass_time(interval * share)
            self.heartbeat(1 - first)
            self.pass_time(interval * (1 - share))

        @rule(index=st.integers(0, REPLICAS - 1), seconds=st.sampled_from([1.0, 2.4, 2.6]))
        def heartbeat_on_a_slow_network(self, index: int, seconds: float) -> None:
            """Sent early, executed late, and the other one looks in between."""
            self.send_heartbeat(index)
            self.pass_time(seconds)
            self.heartbeat(1 - index)
            self.execute_heartbeat(index)
            self.answer_heartbeat(index)

        @rule(index=st.integers(0, REPLICAS - 1))
        def step(self, index: int) -> None:
            replica = self.replicas[index]
            candidacy, session, server = replica.candidacy, replica.session, self.server
            if replica.beat is not None or replica.begin is not None or session is None:
                return
            step = candidacy.next(self.now)
            if step is decision.Step.NOTHING:
                return
            if not session.alive:
                self.cut(replica)
                return
            session.last_statement = self.now
            assert server.holder is session, "a step on a lock that is another's"
            if step is decision.Step.READ:
                candidacy.read(server.row)
            elif step is decision.Step.BEGIN:
                epoch = max(server.row.epoch, (server.timeline - 1) << 32) + 1
                server.lost_rows.append(server.row)
                server.row = decision.Row(
                    epoch=epoch,
                    holder=replica.instance,
                    pid=session.pid,
                    trust=replica.timing.trust,
                    horizon=replica.timing.horizon,
                    fenced=fenced,
                    timeline=server.timeline,
                    released=False,
                )
                replica.begin = (epoch,)
            else:
                assert not candidacy.worker_runs, "released while the worker runs"
                if server.row.holder == replica.instance and server.row.epoch == candidacy.epoch:
                    server.lost_rows.append(server.row)
                    server.row = replace(server.row, released=True)
                server.holder = None
                candidacy.released()

        @rule(index=st.integers(0, REPLICAS - 1))
        def answer_begin(self, index: int) -> None:
            """The elector starts the worker in the instant in which it learns that the epoch is committed."""
            replica = self.replicas[index]
            if replica.begin is None:
                return
            (epoch,), replica.begin = replica.begin, None
            replica.candidacy.begun(epoch, self.now)
            if self.now >= replica.candidacy.trust_until:
                # the term is lost before it began: the worker's first check ends it
                replica.candidacy.expire()
                replica.candidacy.ended(self.now, 1.0)
                return
            self.begun.append(epoch)
            if not fenced:
                for other in self.replicas:
                    if other is not replica and other.candidacy.worker_runs:
                        raise AssertionError(
                            f"{replica.instance} begins at {self.now}, {other.instance} may run to"
                            f" {other.candidacy.kill_at}"
                        )

        @rule(index=st.integers(0, REPLICAS - 1), asked=st.booleans())
        def end_worker(self, index: int, asked: bool) -> None:
            candidacy = self.replicas[index].candidacy
            if asked:
                candidacy.ask()
            if candidacy.worker_runs:
                candidacy.ended(self.now, 1.0)

        @precondition(lambda self: len(self.replicas) == REPLICAS)
        @invariant()
        def epochs_rise(self) -> None:
            assert self.begun == sorted(set(self.begun)), f"epochs did not rise: {self.begun}"

    return Lease


@pytest.fixture(scope="module")
def package(bake: Callable[..., Path]) -> Iterator[str]:
    """A baked project's package, importable."""
    project = bake(project_slug="modelled")
    sys.path.insert(0, str(project / "src"))
    yield "modelled"
    sys.path.remove(str(project / "src"))


@pytest.mark.parametrize("fenced", [False, True], ids=["external", "fenced"])
def test_no_interleaving_lets_two_lead(package: str, fenced: bool) -> None:
    decision = importlib.import_module(f"{package}.lease.decision")
    case = machine(decision, importlib.import_module(f"{package}.config"), fenced=fenced).TestCase
    case.settings = settings(
        max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
