"""What is under `deploy/`: checked by the tools of the field, and run as near to its real place as this machine allows."""

import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import kubernetes_validate
import psycopg
import pytest
import yaml
from dotenv import dotenv_values

from conftest import Bake, Uv
from laboratory.environment import clean_environment
from laboratory.servers import Postgres, embedded_binaries, room_for_servers, wait_until

pytestmark = pytest.mark.slow

ROLES = ("poller", "scheduler", "reconciler")
PREFIX = "ACME_BILLING_"
SUBSETS = [",".join(names) for size in (1, 2, 3) for names in itertools.combinations(ROLES, size)]

#: A job that is due each second, since the one that comes with a project is due each minute.
JOB = '''

@job("each_second", every="1s")
def each_second(conn: psycopg.Connection, run: Run) -> None:
    """Nothing but the ledger's row."""
'''


#: What a PodMonitor may say, from the operator's own Go types.
OPERATOR = ("@kubernetes-models/prometheus-operator@6.0.0", "typescript@5.9.3")
TYPED = """
import type { IPodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
export const monitor: IPodMonitor = %s;
"""
TSC = ("npx", "tsc", "--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022")


def check(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a tool that has to find nothing wrong; returns what it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def project(bake: Bake, uv: Uv) -> Path:
    """An installed project with its real workers."""
    made = bake()
    with (made / "workers/scheduler/src/acme_billing_scheduler/jobs.py").open("a") as jobs:
        jobs.write(JOB)
    uv("sync", "--no-dev", "--all-extras", cwd=made)
    return made


# What manages processes


@pytest.mark.needs("kubectl")
@pytest.mark.parametrize("workers", SUBSETS)
def test_kubernetes_takes_every_manifest(bake: Bake, workers: str) -> None:
    manifests = bake(workers=workers) / "deploy/kubernetes"
    listed = yaml.safe_load((manifests / "kustomization.yaml").read_text())["resources"]
    optional = {path.name for path in manifests.glob("*.yaml")} - {*listed, "kustomization.yaml"}
    assert optional == {"podmonitor.yaml", *(["cronjob.yaml"] if "scheduler" in workers else [])}
    kustomization = manifests / "kustomization.yaml"
    kustomization.write_text(
        kustomization.read_text().replace(
            "resources:\n", "".join(["resources:\n", *(f"  - {name}\n" for name in optional)])
        )
    )
    resources = {
        resource["kind"]: resource
        for resource in yaml.safe_load_all(check("kubectl", "kustomize", manifests, cwd=manifests))
    }
    monitor = resources.pop("PodMonitor")  # no kind of Kubernetes' own
    for resource in resources.values():
        kubernetes_validate.validate(resource, "1.37", strict=True)
    assert set(resources) - {"CronJob"} == {"ConfigMap", "Deployment", "Job", "PodDisruptionBudget"}

    pod = resources["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["envFrom"][0]["configMapRef"]["name"] == resources["ConfigMap"]["metadata"]["name"]
    assert container["image"] == resources["Job"]["spec"]["template"]["spec"]["containers"][0]["image"]
    for other in (resources["PodDisruptionBudget"], monitor):
        assert other["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == container["ports"][0]["name"]
    # the Job's pods are none of the Deployment's
    assert resources["Job"]["spec"]["template"]["metadata"]["labels"] != pod["metadata"]["labels"]
    toggles = {name: value for name, value in resources["ConfigMap"]["data"].items() if name.endswith("_ENABLED")}
    assert toggles == {f"{PREFIX}{name.upper()}_ENABLED": "false" for name in workers.split(",")}


@pytest.mark.needs("npm", "node")
def test_the_prometheus_operator_takes_its_manifest_and_would_refuse_a_misspelt_one(bake: Bake, tmp_path: Path) -> None:
    monitor = yaml.safe_load((bake() / "deploy/kubernetes/podmonitor.yaml").read_text())
    check("npm", "install", "--silent", "--no-audit", "--no-fund", *OPERATOR, cwd=tmp_path)
    (tmp_path / "monitor.mts").write_text(TYPED % json.dumps(monitor))
    check(*TSC, "monitor.mts", cwd=tmp_path)
    (tmp_path / "misspelt.mts").write_text(TYPED % json.dumps(monitor).replace("interval", "intervall"))
    with pytest.raises(AssertionError, match="intervall"):
        check(*TSC, "misspelt.mts", cwd=tmp_path)


def test_the_settings_of_the_manifests_are_settings_and_the_grace_is_longer_than_the_drain(project: Path) -> None:
    given = dotenv_values(project / "deploy/kubernetes/settings.env")
    code = """
from acme_billing.config import environment, load_settings
settings = load_settings()
unknown = [name for name in environment() if name.lower() not in type(settings).model_fields]
print(settings.drain_timeout_seconds + settings.ttl_seconds, *unknown)
"""
    environment = {name: value or "" for name, value in given.items()}
    seconds, *unknown = check(project / ".venv/bin/python", "-c", code, cwd=project, **environment).split()
    assert unknown == [f"{role.upper()}_ENABLED" for role in ROLES]
    check(project / ".venv/bin/acme-billing", "workers", cwd=project, **environment)  # each toggle is a worker's
    deployment = yaml.safe_load((project / "deploy/kubernetes/deployment.yaml").read_text())
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > float(seconds)
    unit = (project / "deploy/systemd/acme-billing.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop is not None
    assert float(stop[1]) > float(seconds)


@pytest.mark.needs("systemd-analyze")
def test_systemd_takes_every_unit(project: Path, tmp_path: Path) -> None:
    for unit in (project / "deploy/systemd").iterdir():
        text = unit.read_text().replace("/opt/acme-billing/.venv", str(project / ".venv"))
        (tmp_path / unit.name.replace("@", "@each_second")).write_text(text)
    # it exits 0 where it ignores a misspelt key, and says so
    assert check("systemd-analyze", "verify", "--man=no", *tmp_path.iterdir(), cwd=tmp_path) == ""


@pytest.mark.needs("root", "unshare")
@pytest.mark.parametrize(("while_it", "code"), [("imports", 143), ("runs", 0)])
def test_process_1_heeds_sigterm(project: Path, tmp_path: Path, while_it: str, code: int) -> None:
    """The kernel drops a signal for process 1 that has no handler, as was so during the imports."""
    settings = {f"{PREFIX}DATABASE_URL": "postgresql://127.0.0.1:1/nowhere"}
    if while_it == "imports":
        (tmp_path / "psycopg.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
        settings["PYTHONPATH"] = str(tmp_path)
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", project / ".venv/bin/acme-billing", "run"],
            cwd=tmp_path,
            env=clean_environment(**settings),
            stdout=log,
            stderr=log,
        ) as outside,
    ):
        try:
            wait_until((tmp_path / "log").read_text, 20, "process 1 says something")
            (pid,) = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
            os.kill(int(pid), signal.SIGTERM)
            assert outside.wait(20) == code
        finally:
            outside.kill()


# The role of replicas


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with room_for_servers() as directory:
        postgres = Postgres(directory / "postgres", embedded_binaries()).start()
        yield postgres
        postgres.stop()


@pytest.fixture(scope="module")
def least(server: Postgres, project: Path) -> Postgres:
    """A database as a careful administrator has it: PUBLIC may do nothing, one role migrates, another one works."""
    with server.connect() as conn:
        conn.execute("create role owner login createrole")
        conn.execute("create database work owner owner")
        conn.execute("revoke all on database work from public")
    work = server.with_database("work")
    with work.connect() as conn:
        conn.execute("revoke all on schema public from public")
    owner = work.url(user="owner")
    check(project / ".venv/bin/acme-billing", "migrate", cwd=project, **{f"{PREFIX}DATABASE_URL": owner})
    for _ in range(2):  # running it again changes nothing
        with psycopg.connect(owner, autocommit=True) as conn:
            conn.execute((project / "deploy/postgres/role.sql").read_bytes())
    return work


@pytest.fixture
def replica(project: Path, least: Postgres, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """`replica()` starts one with all workers on, as the least role."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        settings = {
            "DATABASE_URL": least.url(user="acme_billing"),
            **{f"{role.upper()}_ENABLED": "true" for role in ROLES},
        }
        with (tmp_path / f"{len(started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [project / ".venv/bin/acme-billing", "run"],
                cwd=tmp_path,
                env=clean_environment(**{f"{PREFIX}{name}": value for name, value in settings.items()}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


FORBIDDEN = [
    "delete from acme_billing.lease",
    "truncate acme_billing.lease",
    "insert into acme_billing.migration (version, name) values (99, 'mine')",
    "update acme_billing.migration set version = version + 1",
    "delete from acme_billing.migration",
    "create table acme_billing.mine ()",
    "alter table acme_billing.lease add mine text",
    "drop table acme_billing.task",
    "create schema mine",
    "create role mine",
]


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_the_role_of_replicas_changes_no_table_and_forgets_no_epoch(least: Postgres, statement: str) -> None:
    with (
        psycopg.connect(least.url(user="acme_billing"), autocommit=True) as conn,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        conn.execute(statement)


def test_all_workers_work_and_hand_over_under_the_least_role(
    project: Path, least: Postgres, replica: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    service = {f"{PREFIX}DATABASE_URL": least.url(user="acme_billing")}
    command = project / ".venv/bin/acme-billing"

    def logs() -> str:
        return "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))

    def led() -> dict[str, str]:
        roles = json.loads(check(command, "status", "--json", cwd=tmp_path, **service))["roles"]
        leading = [role for role in roles if role["state"] == "leading"]
        # of the leader's session, which another role may not see
        assert all(role["heartbeat_age_seconds"] is not None for role in leading)
        return {role["role"]: role["holder"] for role in leading}

    with psycopg.connect(least.url(user="owner"), autocommit=True) as owner:
        owner.execute("create table acme_billing.invoice (id bigint generated always as identity, paid boolean)")
        owner.execute(
            "insert into acme_billing.task (kind, state, finished_at) values ('old', 'done', now() - interval '1 year')"
        )
    first = replica()
    wait_until(lambda: len(led()) == 3, 20, logs)
    leader = set(led().values())
    second = replica()
    wait_until(lambda: logs().count("lease.standby") >= 3, 20, logs)
    with psycopg.connect(least.url(user="acme_billing"), autocommit=True) as conn:
        conn.execute("insert into acme_billing.invoice (paid) values (true)")  # a table of a later migration
        conn.execute("insert into acme_billing.task (kind) values ('echo')")
        for worker, done in {
            "poller": "select from acme_billing.task where kind = 'echo' and state = 'done'",
            "scheduler": "select from acme_billing.job_run where job = 'each_second' and state = 'succeeded'",
            "reconciler": "select where not exists (select from acme_billing.task where kind = 'old')",
        }.items():
            wait_until(lambda: conn.execute(done).fetchall(), 20, lambda: f"the {worker} works\n{logs()}")  # noqa: B023
    check(command, "doctor", cwd=tmp_path, **service, **{f"{PREFIX}POLLER_ENABLED": "true"})
    check(command, "verify", cwd=tmp_path, **service)
    cron_job = yaml.safe_load((project / "deploy/kubernetes/cronjob.yaml").read_text())
    (container,) = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    check(command, *container["args"], cwd=tmp_path, **service)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
    wait_until(lambda: len(led()) == 3, 20, logs)
    assert not leader & set(led().values())
    second.send_signal(signal.SIGTERM)
    assert second.wait(30) == 0
    assert "permission denied" not in logs()
    assert "Traceback" not in logs()
