"""Alerts and dashboard: checked by the tools of those who will load them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from conftest import Bake


def promtool(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=cwd,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("answers", [{}, {"workers": "scheduler"}, {"project_slug": "a" * 30}], ids=str)
def test_each_alert_fires_and_clears(bake: Bake, answers: dict[str, str]) -> None:
    project = bake(**answers)
    directory = project / "deploy" / "prometheus"
    rules = sorted(path for path in directory.glob("*.yaml") if not path.stem.endswith("_test"))
    assert len(rules) == (1 if "workers" in answers else 2)
    promtool("check", "rules", *rules, cwd=directory)
    for path in rules:
        test = directory / f"{path.stem}_test.yaml"
        promtool("test", "rules", test, cwd=directory)
        # each alert has a moment at which it must fire, and later one at which it must not
        for alert in re.findall(r"alert: (\w+)", path.read_text()):
            trials = re.findall(rf"eval_time: (\S+)\n +alertname: {alert}\n +exp_alerts:( \[\])?", test.read_text())
            fires = [not none for _, none in trials]
            assert True in fires, f"{alert} never fires"
            assert False in fires[fires.index(True) :], f"{alert} never clears"


@pytest.mark.needs("promtool")
def test_an_alert_that_never_fires_is_noticed(bake: Bake) -> None:
    directory = bake() / "deploy" / "prometheus"
    rules = directory / "alerts.yaml"
    for alert in re.findall(r"alert: (\w+)", rules.read_text()):
        before = rules.read_text()
        broken = re.sub(rf"(alert: {alert}\n +expr: )(.*)", r"\1vector(0) > 1", before)
        assert broken != before
        rules.write_text(broken)
        done = subprocess.run(
            ["promtool", "test", "rules", "alerts_test.yaml"],
            cwd=directory,
            check=False,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode != 0, alert
        rules.write_text(before)


def lost(ours: Any, theirs: Any, path: str = "dashboard") -> list[str]:
    """What of ours is not in what was made of it."""
    if isinstance(ours, dict):
        return [
            found
            for name, value in ours.items()
            for found in (lost(value, theirs[name], f"{path}.{name}") if name in theirs else [f"{path}.{name}"])
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [found for i, value in enumerate(ours) for found in lost(value, theirs[i], f"{path}[{i}]")]
    return [] if ours == theirs else [path]


@pytest.mark.needs("promtool")
def test_the_dashboard_loads(bake: Bake, tmp_path: Path) -> None:
    """Grafana's own model of a dashboard reads it and gives all of it back; Prometheus' own parser reads each query."""
    dashboard = json.loads((bake() / "deploy" / "grafana" / "dashboard.json").read_text())
    register_default_plugins()
    model = Dashboard.from_json(dashboard)
    assert lost(dashboard, json.loads(json.dumps(model, cls=JSONEncoder))) == []
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(taken)) == len(taken)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "rules.yaml", cwd=tmp_path)
