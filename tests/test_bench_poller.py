"""The poller's measurement runs, and what does not depend on the machine holds: nothing twice, no table scan."""

import argparse
import json
import os
import tempfile
from pathlib import Path

import pytest

from bench import poller

pytestmark = pytest.mark.slow


def test_a_small_run_counts_each_effect_once_and_its_plans_go_by_indexes() -> None:
    options = argparse.Namespace(rows=[20_000], measured=10_000, trials=5, load=os.getloadavg())
    # not below pytest's own directory, which the server's user can't reach
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        Path(name).chmod(0o755)
        results = json.loads(json.dumps(poller.measure(options, Path(name))))
    (run,) = results["runs"]
    assert run["effects_twice"] == 0
    assert run["tasks_per_second"] > 300, "a fifteenth of what a quiet machine does"
    assert results["wake_up_ms"]["median"] < 500, "it is woken, and does not wait for its next look"
    for name in poller.EXPLAINED:
        assert "Seq Scan" not in "\n".join(run["plans"][name])
        assert "Index" in "\n".join(run["plans"][name])
    assert f"| 20,000 | 20,000 | 10,000 | {run['tasks_per_second']:,} |" in poller.markdown(results)
