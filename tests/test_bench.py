"""The bench: its arithmetic, and a small run of it with a peer at its side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.failover import Trial
from bench.poller import Poller, Throughput
from bench.report import goals, load, write
from bench.spans import Span, read, seconds
from laboratory.environment import clean_environment

TEMPLATE = Path(__file__).resolve().parents[1]


def test_time_without_a_worker_and_time_with_two_are_told_apart() -> None:
    spans = [Span(1, 0.0, 4.0), Span(2, 3.0, 6.0), Span(1, 8.0, 9.0)]
    nobody, several = seconds(spans, 1.0, 10.0)
    assert (nobody, several) == (2.0 + 1.0, 1.0)


def test_two_spans_of_one_process_are_not_two_workers() -> None:
    assert seconds([Span(1, 0.0, 4.0), Span(1, 3.0, 6.0)], 0.0, 6.0) == (0.0, 0.0)


def test_a_pause_ends_a_span_and_half_a_line_does_not_count(tmp_path: Path) -> None:
    lines = ["1.00 1.00 .", "1.01 1.01 .", "9.00 9.00 .", "9.01 9.01 .", "9.02 9."]
    (tmp_path / "leader.7.1.record").write_text("\n".join(lines))
    assert read(tmp_path) == {"leader": [Span(7, 1.0, 1.01), Span(7, 9.0, 9.01)]}


def test_a_trial_that_failed_is_told_in_the_report(tmp_path: Path) -> None:
    write(
        {"failover": [Trial("us", "SIGTERM", "x", 0.5, 0.0, 2.0), "them, SIGTERM: broken"]}, tmp_path, ["PostgreSQL 0"]
    )
    text = (tmp_path / "bench.md").read_text()
    assert "failed: them, SIGTERM: broken" in text
    assert "0.50" in text


def test_a_missed_goal_is_told() -> None:
    ours, slow = "this service, fast timing, fenced", "a peer"
    trials = [
        Trial(ours, "SIGTERM", "x", 0.01, 0.0, 2.0),
        Trial(ours, "SIGKILL", "x", 0.3, 0.0, 2.0),
        Trial(slow, "SIGTERM", "x", 5.0, 0.0, 9.0),
        Trial(slow, "SIGKILL", "x", 0.2, 0.0, 9.0),
    ]
    verdicts = [line.strip("| ").rpartition(" | ")[2] for line in goals(trials)[3:]]
    assert verdicts == [
        "met",  # never two
        "met",  # hands over
        "**missed**",  # SIGKILL within an interval
        "met",  # ahead of the peer at SIGTERM
        "**missed**",  # and behind it at SIGKILL
    ]
    two = goals([Trial(ours, "SIGTERM", "x", 0.01, 1.0, 2.0)])
    assert "in 1 of 1 trials | **missed**" in two[3]


def test_one_part_can_be_measured_again_and_the_others_are_kept(tmp_path: Path) -> None:
    first = {
        "failover": [Trial("us", "SIGTERM", "x", 0.5, 0.0, 2.0)],
        "poller": Poller([Throughput("us", 0, [1.0], [2.0])], [3.0], {"LOOK": ["Index Scan"]}),
    }
    write(first, tmp_path, ["PostgreSQL 0"])
    assert load(tmp_path, ["PostgreSQL 0"]) == first
    assert load(tmp_path, ["PostgreSQL 1"]) == {}, "another version is another measurement"


@pytest.mark.slow
def test_one_command_measures_this_service_next_to_a_peer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--only", "failover", "--among", "fast", "naive", "--faults", "SIGTERM"]
    done = subprocess.run(
        [*command, "--trials", "1", "--out", tmp_path],
        cwd=TEMPLATE,
        env=clean_environment(PATH=os.environ["PATH"]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())["failover"]
    assert {each["contestant"] for each in found} == {
        "this service, fast timing, external",
        "this service, fast timing, fenced",
        "naive loop",
    }
    for each in found:
        assert each["several"] == 0
        assert 0 < each["nobody"] < each["over"], "somebody took over"
