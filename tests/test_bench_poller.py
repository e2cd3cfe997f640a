"""The poller's measurement runs, and what does not depend on the machine holds: nothing twice, no table scan."""

import pytest

from bench import poller, report
from laboratory.servers import room_for_servers

pytestmark = pytest.mark.slow


def test_a_small_run_next_to_a_peer_and_its_plans_go_by_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "LEAST_WAITING", 50_000)
    monkeypatch.setattr(poller, "WARM_UP", 0.5)
    with room_for_servers() as directory:
        found = poller.measure(directory / "queues", [20_000], 1, 1, ["pgqueuer"], print)
    assert [(each.queue, each.behind) for each in found.throughput] == [("this service", 20_000), ("pgqueuer", 20_000)]
    for each in found.throughput:
        assert each.tasks_per_second[0] > 100
        assert each.tasks_per_cpu_second[0] > 100
    assert sorted(found.wake_up_ms)[len(found.wake_up_ms) // 2] < 500, (
        "it is woken, and does not wait for its next look"
    )
    for name in poller.EXPLAINED:
        assert "Seq Scan" not in "\n".join(found.plans[name])
        assert "Index" in "\n".join(found.plans[name])
    text = "\n".join(report.poller(found))
    assert "| this service | 20,000 |" in text
    assert "times the better one" in text
