"""The lease's logic, one rule a test: no thread, no database, a clock that is a number."""

import pytest

from {{ cookiecutter.project_slug }}.config import Timing
from {{ cookiecutter.project_slug }}.lease.decision import Candidacy, Doubt, Holder, Phase, Row, Seen, Step

TIMING = Timing(interval=1, ttl=6, stop_grace=2)  # trust 2.5, kill 4.5, horizon 4.75
OLDER_RELEASE = Timing(interval=2, ttl=12, stop_grace=4)  # trust 5, kill 9, horizon 9.5

FREE = Seen()
WON = Seen(won=True)
HELD = Seen(held=True)


def row(**changes: object) -> Row:
    """The row of another replica's term that never said it had ended."""
    values: dict[str, object] = {
        "epoch": 7,
        "holder": "other",
        "pid": 100,
        "trust": TIMING.trust,
        "horizon": TIMING.horizon,
        "fenced": False,
        "timeline": 1,
        "released": False,
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


def seen(heard: float | None = 1.0, *, pid: int = 100, epoch: int = 7) -> Seen:
    return Seen(holder=Holder(pid, "other", epoch, heard))


def winner(at: float = 0.0, *, fenced: bool = False, before: Seen | None = None, silent: float = 0.0) -> Candidacy:
    """A candidacy that won the lock with a heartbeat at `at`.

    One a second earlier saw `before`, and so had one `silent` seconds before that.
    """
    candidacy = Candidacy("me", TIMING, fenced=fenced)
    if before is not None:
        candidacy.beat(at - 1 - silent, at - 1 - silent, 1, before)
        candidacy.beat(at - 1, at - 1, 1, before)
    candidacy.beat(at, at, 1, WON)
    return candidacy


def leader(at: float = 0.0) -> Candidacy:
    """A candidacy that leads since a heartbeat at `at`."""
    candidacy = winner(at)
    candidacy.read(row(released=True))
    assert candidacy.next(at) is Step.BEGIN
    candidacy.begun(8, at)
    return candidacy


def test_a_free_lock_is_tried_for_and_its_row_is_read_first() -> None:
    candidacy = Candidacy("me", TIMING, fenced=False)
    assert candidacy.tries(0)
    candidacy.beat(0, 0, 1, WON)
    assert candidacy.next(0) is Step.READ
    assert not candidacy.tries(0)


def test_a_clean_release_is_succeeded_at_once() -> None:
    candidacy = winner()
    candidacy.read(row(released=True))
    assert candidacy.next(0) is Step.BEGIN


def test_after_an_unclean_end_the_successor_waits_from_when_it_won_the_lock() -> None:
    # what it saw a second earlier proves nothing: the leader may have renewed right after that
    candidacy = winner(at=100, before=seen(), silent=0.9)
    candidacy.read(row())
    assert candidacy.start_at == 100 + TIMING.horizon


def test_a_holder_seen_silent_for_longer_than_it_trusts_itself_is_waited_for_from_when_that_was_first_seen() -> None:
    candidacy = winner(at=100, before=seen(), silent=4)
    candidacy.read(row())
    assert candidacy.start_at == 95 + TIMING.horizon


@pytest.mark.parametrize("heard", [3601.0, -3599.0], ids=["forwards", "backwards"])
def test_a_jump_of_the_servers_clock_is_no_silence(heard: float) -> None:
    candidacy = Candidacy("me", TIMING, fenced=False)
    candidacy.beat(98, 98, 1, seen(1.0))
    candidacy.beat(99, 99, 1, seen(heard))
    candidacy.beat(100, 100, 1, WON)
    candidacy.read(row())
    assert candidacy.start_at == 100 + TIMING.horizon


def test_silence_counts_from_the_end_of_the_first_look_to_the_start_of_the_last() -> None:
    candidacy = Candidacy("me", TIMING, fenced=False)
    candidacy.beat(90, 91, 1, seen())
    candidacy.beat(91 + TIMING.trust - 0.1, 99, 1, seen())
    candidacy.beat(100, 100, 1, WON)
    candidacy.read(row())
    assert candidacy.start_at == 100 + TIMING.horizon


def test_silence_that_this_role_may_not_see_counts_for_nothing() -> None:
    candidacy = winner(at=100, before=seen(None), silent=4)
    candidacy.read(row())
    assert candidacy.start_at == 100 + TIMING.horizon


@pytest.mark.parametrize("other", [seen(pid=101), seen(epoch=6)], ids=["pid", "epoch"])
def test_the_silence_of_another_session_or_of_an_earlier_term_counts_for_nothing(other: Seen) -> None:
    candidacy = winner(at=100, before=other, silent=4)
    candidacy.read(row())
    assert candidacy.start_at == 100 + TIMING.horizon


def test_a_sighting_does_not_outlive_the_session_that_made_it() -> None:
    candidacy = Candidacy("me", TIMING, fenced=False)
    candidacy.beat(95, 95, 1, seen())
    candidacy.beat(99, 99, 1, seen())
    candidacy.cut()
    candidacy.beat(100, 100, 1, WON)
    candidacy.read(row())
    assert candidacy.start_at == 100 + TIMING.horizon


def test_the_predecessors_promises_count_not_ours() -> None:
    promises = {"trust": OLDER_RELEASE.trust, "horizon": OLDER_RELEASE.horizon}
    candidacy = winner(at=100, before=seen(), silent=4)
    candidacy.read(row(**promises))
    assert candidacy.start_at == 109.5
    candidacy = winner(at=100, before=seen(), silent=5)
    candidacy.read(row(**promises))
    assert candidacy.start_at == 103.5


@pytest.mark.parametrize(
    "stale",
    [
        row(timeline=2, released=True),
        row(timeline=None, released=True),
        row(timeline=2, holder="me"),
        row(timeline=2, fenced=True),
    ],
    ids=["released", "timeline unreadable", "our own term", "fenced"],
)
def test_a_row_of_another_timeline_proves_nothing(stale: Row) -> None:
    candidacy = winner(at=100, fenced=True, before=seen(), silent=4)
    candidacy.read(stale)
    assert candidacy.start_at == 100 + TIMING.horizon


def test_our_own_former_term_needs_no_wait() -> None:
    candidacy = winner()
    candidacy.read(row(holder="me"))
    assert candidacy.next(0) is Step.BEGIN


def test_fenced_after_fenced_needs_no_wait_and_fenced_after_external_does() -> None:
    candidacy = winner(fenced=True)
    candidacy.read(row(fenced=True))
    assert candidacy.next(0) is Step.BEGIN
    candidacy = winner(fenced=True)
    candidacy.read(row(fenced=False))
    assert candidacy.next(0) is Step.NOTHING
    candidacy = winner(fenced=False)
    candidacy.read(row(fenced=True))
    assert candidacy.next(0) is Step.NOTHING


def test_the_term_begins_when_the_wait_is_over_and_not_before() -> None:
    candidacy = winner()
    candidacy.read(row())
    for second in (1, 2, 3, 4, 4.75):
        assert candidacy.next(second - 0.01) is Step.NOTHING
        candidacy.beat(second, second, 1, HELD)
    assert candidacy.next(4.75) is Step.BEGIN


def test_a_process_that_slept_proves_its_session_again_before_it_begins() -> None:
    candidacy = winner()
    candidacy.read(row(released=True))
    assert candidacy.next(3) is Step.NOTHING
    candidacy.beat(3, 3, 1, HELD)
    assert candidacy.next(3) is Step.BEGIN


def test_a_row_that_a_transaction_holds_is_tried_again_an_interval_later() -> None:
    candidacy = winner()
    candidacy.read(row(released=True))
    candidacy.begun(None, 0)
    assert candidacy.phase is Phase.HOLDING
    assert candidacy.next(0.9) is Step.NOTHING
    assert candidacy.next(1) is Step.BEGIN


def test_trust_counts_from_the_start_of_a_heartbeat() -> None:
    candidacy = leader()
    candidacy.beat(started=1, ended=2, timeline=1, seen=HELD)
    assert candidacy.trust_until == 1 + TIMING.trust
    assert candidacy.kill_at == 1 + TIMING.kill
    candidacy = Candidacy("me", TIMING, fenced=False)
    candidacy.beat(started=1, ended=2, timeline=1, seen=WON)
    assert candidacy.trust_until == 1 + TIMING.trust
    candidacy.beat(started=3, ended=4, timeline=1, seen=HELD)
    assert candidacy.trust_until == 3 + TIMING.trust


def test_an_answer_after_the_deadline_revives_nothing_and_puts_off_no_kill() -> None:
    candidacy = leader()
    candidacy.beat(started=2, ended=2.6, timeline=1, seen=HELD)
    assert candidacy.phase is Phase.ENDING
    assert candidacy.kill_at == TIMING.kill
    candidacy.beat(started=3, ended=3, timeline=1, seen=HELD)
    assert candidacy.kill_at == TIMING.kill


def test_a_heartbeat_puts_off_no_kill_of_a_term_that_expired() -> None:
    candidacy = leader()
    candidacy.expire()
    candidacy.beat(started=1, ended=1, timeline=1, seen=HELD)
    assert candidacy.kill_at == TIMING.kill


def test_the_deadline_ends_the_term_without_any_heartbeat() -> None:
    early, late = leader(), leader()
    early.next(TIMING.trust - 0.01)
    late.next(TIMING.trust)
    assert (early.phase, late.phase) == (Phase.LEADING, Phase.ENDING)


def test_the_lease_is_kept_and_renewed_until_the_worker_has_ended() -> None:
    candidacy = leader()
    candidacy.ask()
    for second in range(1, 10):
        candidacy.beat(second, second, 1, HELD)
        assert candidacy.next(second) is Step.NOTHING
        assert candidacy.kill_at == second + TIMING.kill
    candidacy.ended(10, 1.0)
    assert candidacy.next(10) is Step.RELEASE
    assert candidacy.kill_at is None


def test_after_a_lost_session_the_role_does_not_compete_until_its_worker_has_ended() -> None:
    candidacy = leader()
    candidacy.cut()
    assert candidacy.phase is Phase.LOST
    assert not candidacy.tries(1)
    candidacy.beat(1, 1, 1, FREE)
    assert candidacy.kill_at == TIMING.kill
    candidacy.ended(2, 1.0)
    assert candidacy.tries(2)


@pytest.mark.parametrize("phase", [winner, leader])
def test_a_lock_that_is_gone_from_the_server_is_a_doubt(phase: type[Candidacy]) -> None:
    candidacy = phase()  # type: ignore[call-arg]
    with pytest.raises(Doubt, match="vanished"):
        candidacy.beat(1, 1, 1, FREE)


def test_a_lock_that_we_hold_and_never_took_is_a_doubt() -> None:
    # two sessions share one server process: a pooler gives it to both
    candidacy = Candidacy("me", TIMING, fenced=False)
    with pytest.raises(Doubt, match="never took"):
        candidacy.beat(0, 0, 1, HELD)


def test_another_timeline_is_a_doubt() -> None:
    candidacy = leader()
    with pytest.raises(Doubt, match="failed over"):
        candidacy.beat(1, 1, 2, HELD)


def test_a_stand_by_asked_to_stop_never_begins_to_lead() -> None:
    candidacy = Candidacy("me", TIMING, fenced=False)
    candidacy.close()
    assert not candidacy.tries(0)
    candidacy = winner()
    candidacy.read(row(released=True))
    candidacy.close()
    assert candidacy.next(0) is Step.RELEASE
    candidacy.released()
    assert not candidacy.tries(100)


def test_a_worker_that_fails_backs_off_longer_each_time_and_starts_afresh_after_a_good_run() -> None:
    candidacy = leader()
    pauses = []
    now = 0.0
    for _ in range(8):
        candidacy.ended(now, 1.0)
        pauses.append(candidacy.retry_at - now)
        candidacy.released()
        now = candidacy.retry_at
        assert not candidacy.tries(now - 0.01)
        candidacy.beat(now, now, 1, WON)
        candidacy.read(row(holder="me"))
        candidacy.begun(9, now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    candidacy.ended(now + 61, 1.0)
    assert candidacy.retry_at == now + 62


def test_stepping_down_leaves_the_others_time_to_take_over() -> None:
    candidacy = leader()
    candidacy.ask()
    candidacy.ended(10, 1.0)
    candidacy.released()
    assert not candidacy.tries(11)
    assert candidacy.tries(12)
