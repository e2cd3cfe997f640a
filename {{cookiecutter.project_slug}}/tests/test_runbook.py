"""The run book has a section for every alert and every finding, and what alerts and dashboard ask for is measured."""

import re
from pathlib import Path

import psycopg
from pydantic import SecretStr

from {{cookiecutter.project_slug}}.config import Settings
from {{cookiecutter.project_slug}}.gates import evaluate
from {{cookiecutter.project_slug}}.keys import SERVICE, LeaseKey
from {{cookiecutter.project_slug}}.lease.journal import Journal, RoleFacts
from {{cookiecutter.project_slug}}.operate.doctor import Check, examine
from {{cookiecutter.project_slug}}.operate.metrics import Metrics
from {{cookiecutter.project_slug}}.operate.picture import Camera
from {{cookiecutter.project_slug}}.operate.verify import verify
from {{cookiecutter.project_slug}}.supervisor import Facts

PROJECT = Path(__file__).parents[1]
RUNBOOK = (PROJECT / "docs" / "runbook.md").read_text()
RULES = "".join(
    path.read_text()
    for path in sorted((PROJECT / "deploy" / "prometheus").glob("*.yaml"))
    if not path.stem.endswith("_test")
)
DASHBOARD = (PROJECT / "deploy" / "grafana" / "dashboard.json").read_text()

A_RUN = """
insert into {{cookiecutter.project_slug}}.job_run (job, period, state, started_at, finished_at)
values ('x', now(), 'succeeded', now(), now())
"""
A_PLAN = """
insert into {{cookiecutter.project_slug}}.job (name, role, schedule, next_period) values ('x', 'x', 'x', now())
"""


def sections(part: str) -> list[str]:
    """Headings below a part of the run book."""
    _, _, rest = RUNBOOK.partition(f"\n## {part}\n")
    return re.findall(r"^### (.*)$", rest.partition("\n## ")[0], re.MULTILINE)


def names(checks: list[Check]) -> list[str]:
    return list(dict.fromkeys(check.name.lower() for check in checks))


def test_every_alert_has_its_section_and_names_it() -> None:
    alerts = re.findall(r"alert: (\w+)", RULES)
    assert alerts
    assert sections("Alerts") == alerts
    assert re.findall(r"runbook_url: (\S+)", RULES) == [f"docs/runbook.md#{alert.lower()}" for alert in alerts]


def test_every_finding_of_doctor_has_its_section_and_names_it(database_url: str) -> None:
    checks = list(examine(Settings(database_url=SecretStr(database_url))))
    assert sections("Findings of doctor") == names(checks)
    assert {check.section for check in checks} == {
        f"docs/runbook.md#{name.replace(' ', '-')}" for name in names(checks)
    }


def test_everything_that_verify_tries_has_its_section(database_url: str) -> None:
    quick = Settings(
        database_url=SecretStr(database_url), interval_seconds=0.2, ttl_seconds=1.5, stop_grace_seconds=0.5
    )
    assert sections("What verify tries") == names(list(verify(quick)))


def test_every_link_in_it_leads_to_a_heading() -> None:
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", RUNBOOK, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", RUNBOOK)) <= headings


def test_its_queries_run(conn: psycopg.Connection) -> None:
    queries = re.findall(r"```sql\n(select.*?)```", RUNBOOK, re.DOTALL)
    assert len(queries) >= 2
    with conn.transaction(force_rollback=True):
        for query in queries:
            conn.execute(query)
        for query in re.findall(r"`(select [^`]*from [^`]*)`", RUNBOOK):
            conn.execute(query)


def test_the_query_shows_a_holder_that_can_be_left_out(conn: psycopg.Connection) -> None:
    key = next(iter(LeaseKey))
    query = re.findall(r"```sql\n(select.*?);", RUNBOOK, re.DOTALL)[0]
    leave_out = re.findall(r"```sql\n\.\.\. (and .*?)\n```", RUNBOOK)[0]
    conn.execute("select set_config('application_name', %s, false)", [f"{SERVICE} 4711-0123abcd@here"])
    conn.execute("select pg_advisory_lock(%s)", [key])
    assert [row[0] for row in conn.execute(query).fetchall()] == [key]
    assert conn.execute(query.replace("order by", f"{leave_out} order by")).fetchall() == []


def test_alerts_and_dashboard_ask_for_metrics_that_there_are(conn: psycopg.Connection, database_url: str) -> None:
    conn.execute(A_RUN)
    conn.execute(A_PLAN)
    key = next(iter(LeaseKey))
    journal = Journal("i", [key])
    journal.beat(0.0, 0.1)
    leads = RoleFacts(key.role, "leading", leads=True, epoch=1, progress_age_seconds=1.0, overdue_seconds=0.0)
    camera = Camera(Settings(database_url=SecretStr(database_url)))
    text = Metrics(lambda: Facts("i", [leads], journal, True, False), evaluate(), camera).answer().body
    there_are = set(re.findall(rf"^({SERVICE}_\w+)", text, re.MULTILINE))
    asked = set(re.findall(rf"\b{SERVICE}_\w+", RULES + DASHBOARD))
    if camera._backlog is None:  # a service without a task queue
        asked = {name for name in asked if not name.startswith(f"{SERVICE}_tasks")}
    assert len(asked) > 10
    assert asked - there_are == set()
    labels = set(re.findall(r'[{,](\w+)="', text))
    grouped = {name for group in re.findall(r"by \(([^)]*)\)", RULES + DASHBOARD) for name in group.split(", ")}
    assert grouped - labels == set()
