"""Breaks each safety rule of the lease in turn, and demands that a test notices: `python tests/mutations.py`.

A project is generated and installed once. Each mutation is applied to a copy of it, whose own tests then run against
it; a few need the template's fault laboratory instead. A mutation that survives is a rule without a test.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from laboratory.environment import clean_environment
from laboratory.servers import Postgres, embedded_binaries, room_for_servers

TEMPLATE = Path(__file__).resolve().parents[1]
SLUG = "acme_billing"
PLACEHOLDER = "{{cookiecutter.project_slug}}"
PATIENCE = 180  # seconds; a mutation that hangs the tests is noticed too

LOGIC = ("tests/test_decision.py",)
TERM = ("tests/test_term.py",)
LEASE = ("tests/test_lease.py",)


def lease(*names: str) -> tuple[str, ...]:
    """Those tests of the lease alone that a mutation is about: each takes a second."""
    return tuple(f"{LEASE[0]}::{name}" for name in names)


@dataclass(frozen=True)
class Mutation:
    """One rule, broken: `old` stands once in `file`, and `new` takes its place."""

    rule: str
    file: str
    old: str
    new: str
    tests: Sequence[str] = LOGIC
    needs: str = ""  # a program without which it can't be shown


@dataclass(frozen=True)
class Outcome:
    mutation: Mutation
    noticed: bool
    by: str
    seconds: float
    output: str = ""


MUTATIONS = [
    # -- the session is ours, and it ends
    Mutation(
        "the heartbeat checks the canary",
        "lease/statements.py",
        "%(canary)s as same,",
        "%(canary)s or true as same,",
        lease("test_a_heartbeat_in_a_session_that_is_not_ours_any_more_is_a_doubt"),
    ),
    Mutation(
        "no lock is tried for in a session that is not ours",
        "lease/statements.py",
        "case when me.same and not",
        "case when not",
        lease("test_a_heartbeat_in_a_session_that_is_not_ours_any_more_is_a_doubt"),
    ),
    Mutation(
        "the server ends a silent session",
        "lease/session.py",
        '"idle_session_timeout": ttl,',
        '"idle_session_timeout": "0",',
        lease("test_the_server_ends_a_silent_session_after_its_ttl"),
    ),
    Mutation(
        "a heartbeat never locks again",
        "lease/statements.py",
        "and locks.pid is null\n",
        "and (locks.pid is null or locks.pid = pg_backend_pid())\n",
        lease("test_heartbeats_confirm_the_lock_and_never_take_it_again"),
    ),
    Mutation(
        "no epoch begins without the lock",
        "lease/statements.py",
        "and exists (select",
        "and true or exists (select",
        lease("test_no_epoch_begins_without_the_lock"),
    ),
    Mutation("a lock that vanished is a doubt", "lease/decision.py", "if not seen.held:\n", "if False:\n", LOGIC),
    Mutation("a lock that we hold and never took is a doubt", "lease/decision.py", "if seen.held:\n", "if False:\n"),
    Mutation(
        "a session that ended ends the term",
        "lease/elector.py",
        "                role.term.lose(SESSION_ENDED)\n",
        "                pass\n",
        lease("test_a_lock_that_vanished_is_noticed_within_one_interval"),
    ),
    Mutation(
        "the probe asks a second connection",
        "lease/stability.py",
        "verdict = _behind_pooler(conn, connect, pid)",
        'verdict = Verdict(Stability.SESSION_POOLED, "")',
        (
            "tests/faults/test_poolers.py::test_nobody_leads_through_a_pooler_that_multiplexes_and_the_log_says_why[transaction-1-idle]",
        ),
        needs="pgbouncer",
    ),
    Mutation(
        "a release that came with an answer is heard",
        "lease/session.py",
        "if early := self.told():",
        "if early := []:",
        lease("test_a_release_that_is_told_with_the_answer_to_a_statement_wakes_too"),
    ),
    Mutation(
        "a step-down ends the term that it was asked of",
        "lease/elector.py",
        "                self._heed(session.told())",
        "                pass",
        lease("test_a_step_down_asked_for_before_a_term_began_does_not_end_it"),
    ),
    # -- the leader stops first
    *[
        Mutation(
            f"trust counts from the start of the heartbeat that {what}",
            "lease/decision.py",
            old,
            old.replace("started", "ended"),
        )
        for what, old in {
            "won the lock": "self.renewed_at = started\n                self._timeline",
            "comes while waiting": "if self.phase is Phase.HOLDING:\n            self.renewed_at = started\n        elif",
            "renews": "elif not self._expired:\n            self.renewed_at = started\n",
        }.items()
    ],
    Mutation(
        "an answer after the deadline revives nothing",
        "lease/decision.py",
        "elif ended >= self.trust_until:",
        "elif False:",
    ),
    Mutation("an expired term is never renewed", "lease/decision.py", "elif not self._expired:", "else:"),
    Mutation(
        "a lost term is not renewed",
        "lease/term.py",
        "            if not self.held:\n",
        "            if False:\n",
        TERM,
    ),
    Mutation("the worker looks at the deadline itself", "lease/term.py", "clock() >= self._deadline or os", "os", TERM),
    Mutation("a term that is lost never begins", "worker.py", "    lease.check()\n    outcome", "    outcome", TERM),
    Mutation(
        "an async worker takes no step after its deadline",
        "worker.py",
        "if not told and not self._term.held:",
        "if False:",
        TERM,
    ),
    Mutation(
        "the kill timer is armed",
        "lease/watchdog.py",
        "        if kills:\n",
        "        if False:\n",
        lease("test_a_process_whose_worker_outlives_its_lease_is_ended"),
    ),
    Mutation(
        "the kill timer waits for no pipe",
        "lease/watchdog.py",
        "os.O_APPEND | os.O_NONBLOCK",
        "os.O_APPEND",
        ("tests/faults/test_workers.py::test_a_full_pipe_for_the_log_keeps_no_process_alive",),
    ),
    Mutation("a forked child never holds the lease", "lease/term.py", " or os.getpid() != self._pid", "", TERM),
    Mutation(
        "a forked child lets go of the session",
        "lease/session.py",
        "os.register_at_fork(after_in_child=_after_fork_in_child)",
        "",
        lease("test_a_forked_child_neither_ends_nor_keeps_the_session"),
    ),
    # -- the successor waits
    Mutation(
        "an unclean end is waited out",
        "lease/decision.py",
        "self.start_at = self._heard_at(row, same_timeline) + horizon",
        "self.start_at = self._won_at",
    ),
    Mutation(
        "a recent sighting proves nothing", "lease/decision.py", "and seen.last - seen.first >= row.trust\n", "\n"
    ),
    Mutation(
        "a sighting counts for the row's own session and term only",
        "lease/decision.py",
        "and (seen.holder.pid, seen.holder.epoch) == (row.pid, row.epoch)\n",
        "\n",
    ),
    Mutation(
        "a sighting ends with its session",
        "lease/decision.py",
        "self._sighting = None\n        self._expired",
        "self._expired",
    ),
    Mutation(
        "the predecessor's promises count",
        "lease/decision.py",
        "self._timing.horizon if row.horizon is None else row.horizon",
        "self._timing.horizon",
    ),
    Mutation(
        "a row of another timeline proves nothing",
        "lease/decision.py",
        "same_timeline = row.timeline is not None and row.timeline == self._timeline",
        "same_timeline = True",
    ),
    Mutation("a fail-over ends the term", "lease/decision.py", "if timeline != self._timeline:", "if False:"),
    Mutation(
        "a fenced worker waits out an external one", "lease/decision.py", "self._fenced and row.fenced", "self._fenced"
    ),
    Mutation(
        "a process that slept proves its session before it begins",
        "lease/decision.py",
        "self.start_at <= now < self.trust_until",
        "self.start_at <= now",
    ),
    # -- the end of a term
    Mutation(
        "no lock is given back while the worker runs",
        "lease/decision.py",
        "if self.phase is Phase.ENDING and not self.worker_runs:",
        "if self.phase is Phase.ENDING:",
    ),
    Mutation(
        "a lost role competes once its worker has ended",
        "lease/decision.py",
        "self.phase = Phase.LOST if self.worker_runs else Phase.STANDBY",
        "self.phase = Phase.STANDBY",
    ),
    Mutation(
        "the loop stays while a worker runs",
        "lease/elector.py",
        "return self._stopping.is_set() and not self.working",
        "return self._stopping.is_set()",
        lease("test_without_a_session_a_stopping_loop_sees_its_worker_out_and_does_not_spin"),
    ),
    Mutation(
        "heartbeats go on while workers drain",
        "lease/elector.py",
        "            if clock() >= self._beat_at:\n",
        "            if clock() >= self._beat_at and not self._stopping.is_set():\n",
        lease("test_the_lease_is_kept_for_a_worker_that_drains_for_longer_than_the_ttl"),
    ),
    Mutation(
        "a stand-by asked to stop never begins",
        "lease/decision.py",
        "            if self._closing:\n                return Step.RELEASE\n",
        "",
    ),
    Mutation(
        "nor does one asked while its epoch was committed",
        "lease/elector.py",
        "if self._stopping.is_set():  # asked",
        "if False:  # asked",
        lease("test_a_stop_while_the_epoch_is_committed_begins_no_term"),
    ),
    Mutation(
        "a term is marked released",
        "lease/session.py",
        "if epoch is not None:",
        "if False:",
        lease("test_each_epoch_is_higher_and_a_released_term_is_marked"),
    ),
    # -- the fence
    Mutation(
        "a fenced transaction compares the epoch",
        "lease/fencing.py",
        " and epoch = %(epoch)s for share",
        " for share",
        lease("test_a_stale_leader_writes_nothing"),
    ),
    Mutation(
        "a fenced transaction holds the row",
        "lease/fencing.py",
        "%(epoch)s for share",
        "%(epoch)s",
        lease("test_the_next_epoch_waits_for_a_transaction_in_flight"),
    ),
    Mutation(
        "each term has a higher epoch",
        "lease/statements.py",
        "<< 32) + 1,",
        "<< 32),",
        lease("test_each_epoch_is_higher_and_a_released_term_is_marked"),
    ),
    Mutation(
        "on a later timeline epochs are higher",
        "lease/statements.py",
        "greatest(lease.epoch, (%(timeline)s::bigint - 1) << 32)",
        "lease.epoch",
        lease("test_on_a_later_timeline_epochs_are_higher_than_any_of_an_earlier_one"),
    ),
]


def run(*command: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def generate(directory: Path) -> Path:
    """An installed project, with what its tests need."""
    project = directory / SLUG
    done = run(sys.executable, "-m", "cookiecutter", "--no-input", "-o", directory, TEMPLATE, cwd=directory)
    if done.returncode == 0:
        done = run("uv", "sync", "--quiet", cwd=project)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    return project


def mutated(root: Path, mutation: Mutation) -> str:
    """The text of the mutation's file below `root`, with the rule broken."""
    text = (root / mutation.file).read_text()
    if (count := text.count(mutation.old)) != 1:
        raise SystemExit(f"{mutation.rule}: {mutation.old!r} stands {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def apply(root: Path, mutation: Mutation) -> None:
    (root / mutation.file).write_text(mutated(root, mutation))


def test(project: Path, mutation: Mutation, url: str) -> Outcome:
    """Run the tests against a copy with one rule broken."""
    started = time.monotonic()
    faults = mutation.tests[0].startswith("tests/faults/")
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy = Path(name) / "copy"
        if faults:
            shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "demo"))
            apply(copy / PLACEHOLDER / "src" / PLACEHOLDER, mutation)
            python, more = Path(sys.executable), {}
        else:
            shutil.copytree(project, copy, ignore=shutil.ignore_patterns(".venv", "__pycache__"))
            apply(copy / "src" / SLUG, mutation)
            python = project / ".venv" / "bin" / "python"
            more = {"PYTHONPATH": str(copy / "src"), "ACME_BILLING_TEST_DATABASE_URL": url}
        try:
            done = run(
                python,
                "-m",
                "pytest",
                "-x",
                "-q",
                "--tb=line",
                "-p",
                "no:cacheprovider",
                *(["-n0"] if faults else []),
                *mutation.tests,
                cwd=copy,
                **more,
            )
        except subprocess.TimeoutExpired:
            return Outcome(mutation, True, "the tests hang", time.monotonic() - started)
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\w+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.rule}: the tests did not run\n{done.stdout}{done.stderr}")
    by = failed.group(1) if failed else "SURVIVES"
    return Outcome(mutation, done.returncode == 1, by, time.monotonic() - started, done.stdout)


def main(words: Sequence[str] = ()) -> int:
    """Try all mutations, or those whose rule has one of the words; the number of survivors."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.rule for word in words)]
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [mutation for mutation in chosen if mutation.needs and shutil.which(mutation.needs, path=path) is None]
    with room_for_servers() as directory:
        project = generate(directory)
        for mutation in chosen:
            compile(mutated(project / "src" / SLUG, mutation), mutation.file, "exec")
        server = Postgres(directory / "postgres", embedded_binaries()).start()
        try:
            untouched = Mutation(
                "nothing is broken", "lease/__init__.py", '"""Leadership', '"""Leadership', LOGIC + TERM + LEASE
            )
            # the slow ones first, so that none runs alone at the end
            order = sorted((m for m in chosen if m not in missing), key=lambda m: "faults" not in m.tests[0])
            with ThreadPoolExecutor(2) as pool:
                control, *outcomes = pool.map(
                    lambda mutation: test(project, mutation, server.url()), [untouched, *order]
                )
            if control.noticed:
                raise SystemExit(f"the tests fail with nothing broken\n{control.output}")
        finally:
            server.stop()
    for outcome in outcomes:
        print(
            f"{'ok ' if outcome.noticed else 'NO '} {outcome.seconds:5.1f} s  {outcome.mutation.rule:60}  {outcome.by}"
        )
    for mutation in missing:
        print(f"--           {mutation.rule:60}  not tried: needs {mutation.needs}")
    survivors = [outcome for outcome in outcomes if not outcome.noticed]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} broken rules were noticed")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
