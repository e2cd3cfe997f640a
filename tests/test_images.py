"""The Dockerfile and compose.yaml, without an engine: buildah builds, the images run as process 1 in a root of theirs."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest
import yaml
from psycopg import sql

from conftest import Bake, Uv
from laboratory.images import BASE, Images
from laboratory.servers import PgBouncer, Postgres, embedded_binaries, free_port, room_for_servers, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.needs("root", "buildah", "unshare")]

SECRETS = (".env", "src/.env", "workers/poller/.env", ".venv/secret", "src/acme_billing/.secrets/key")
PASSWORDS = {"POSTGRES_PASSWORD": "o'wner% @/:\\", "SERVICE_PASSWORD": "s3rvice?#&= '"}


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    directory = Path(mkdtemp(prefix="images-"))
    try:
        built = Images(directory)
        yield built
        built.run("rm", "--all")
    finally:
        # buildah keeps its storage mounted
        subprocess.run(["umount", "--quiet", "--recursive", "--lazy", directory / "storage/overlay"], check=False)
        rmtree(directory)


@pytest.fixture(scope="module")
def project(bake: Bake, uv: Uv) -> Path:
    """A project with a lock file, and secrets where people leave them."""
    made = bake()
    for name in SECRETS:
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text("hunter2")
    uv("lock", cwd=made)
    return made


@pytest.fixture(scope="module")
def default(images: Images, project: Path) -> str:
    """The image that a plain build gives, and the output of a second build after a change in the code."""
    assert images.build(project, "default").returncode == 0
    with (project / "src/acme_billing/log.py").open("a") as module:
        module.write("\n# changed\n")
    second = images.build(project, "default")
    assert second.returncode == 0, second.stdout
    return second.stdout


def end(container: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """End a container with its process 1: the kernel forgets `--kill-child` when that changes its user."""
    if container.poll() is None:
        for pid in Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def names(root: Path, *below: str) -> set[str]:
    return {str(path.relative_to(root)) for top in below for path in (root / top).rglob("*")}


# Images


def test_hadolint_finds_nothing(project: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), project / "deploy/docker/Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_build_without_a_lock_file_ends_with_the_command_that_makes_one(images: Images, bake: Bake) -> None:
    built = images.build(bake(), "without-lock")
    assert built.returncode != 0
    assert "There is no uv.lock. Make it and commit it: uv lock\n" in built.stdout


def test_the_context_holds_no_secret_and_no_environment_of_the_machine(
    images: Images, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    images.run("build", "--tag", "context", "--file", tmp_path / "Dockerfile", project)
    with images.mounted("context") as root:
        held = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    assert {path.parts[0] for path in held} == {
        *("pyproject.toml", "uv.lock", "README.md", "CHANGELOG.md", "LICENSE", "src", "workers"),
    }
    assert not [path for path in held if any(part.startswith(".") for part in path.parts)]


def test_the_default_image_holds_the_environment_alone_and_no_line_of_a_worker(images: Images, default: str) -> None:
    with images.mounted(BASE) as root:
        before = names(root, "etc", "usr", "lib", "bin", "root")
    with images.mounted("localhost/default") as root:
        assert names(root, "etc", "usr", "lib", "bin", "root") == before
        assert {path.name for path in root.iterdir()} - {"dev", "proc", "tmp"} <= {
            "bin",
            "etc",
            "lib",
            "lib64",
            "opt",
            "usr",
        }
        assert [path.name for path in (root / "opt").iterdir()] == ["service"]
        held = names(root, "opt")
        found = subprocess.run(["grep", "-rl", "hunter2", root / "opt"], capture_output=True, text=True, check=False)
        # neither a worker's package nor its entry point; the registry of keys knows their names
        modules = [name for name in held if re.search(r"(poller|scheduler|reconciler|cronsim)[^/]*(/|$)", name)]
        owned = [path for path in root.rglob("*") if path.lstat().st_uid == 10001]
    assert "opt/service/bin/acme-billing" in held
    assert modules == []
    assert found.stdout == ""
    assert owned == []
    config = images.config("localhost/default")
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == ("10001:10001", ["acme-billing"], ["run"])


def test_a_change_of_the_code_leaves_the_layer_of_third_party_packages_alone(default: str) -> None:
    assert "+ acme-billing==0.1.0" in default
    assert "psycopg" not in default


# compose.yaml


@pytest.fixture
def server() -> Iterator[Postgres]:
    """As the image `postgres` starts it: a database of the service's name, and passwords for whoever comes by TCP."""
    with room_for_servers() as directory:
        postgres = Postgres(directory / "postgres", embedded_binaries()).start()
        with postgres.connect() as conn:
            conn.execute("create database acme_billing")
            password = sql.Literal(PASSWORDS["POSTGRES_PASSWORD"])
            conn.execute(sql.SQL("alter role postgres password {}").format(password))
            (postgres.data / "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\n")
            conn.execute("select pg_reload_conf()")
        yield postgres
        postgres.stop()


def test_compose_takes_its_file_and_names_what_is_missing(project: Path) -> None:
    check = (Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    subprocess.run([*check, project / "compose.yaml"], check=True)
    text = (project / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+):\?set it in \.env", text)) == set(PASSWORDS)
    assert set(re.findall(r"\$\{(\w+)", text)) == {*PASSWORDS, "EXTRAS"}


@pytest.mark.needs("pgbouncer")
def test_what_compose_says_gives_three_healthy_replicas_of_which_one_leads(
    images: Images, project: Path, default: str, server: Postgres, tmp_path: Path
) -> None:
    """Its commands, environments and files, with the host names of its network made ports of this machine."""
    assert images.build(project, "localhost/poller", EXTRAS="poller reconciler").returncode == 0
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    services, configs = compose["services"], compose["configs"]
    bouncer = PgBouncer(server.directory / "pgbouncer", server, "transaction", 1)

    def expand(text: str) -> str:
        text = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: PASSWORDS[found[1]], text)
        return (
            text.replace("@postgres:5432/", "@postgres/")
            .replace("@postgres/", f"@127.0.0.1:{server.port}/")
            .replace("@pgbouncer:6432/", f"@127.0.0.1:{bouncer.port}/")
        )

    def environment(service: str, **more: str) -> dict[str, str]:
        given = {name: expand(value) for name, value in services[service]["environment"].items()}
        return images.environment("localhost/poller") | given | more

    with ExitStack() as stack:
        root = stack.enter_context(images.mounted("localhost/poller"))
        entry = images.config("localhost/poller")["Entrypoint"]

        def command(*words: str) -> list[str]:
            return images.container("localhost/poller", root, *words)

        subprocess.run(command(*entry, *services["migrate"]["command"]), env=environment("migrate"), check=True)

        (tmp_path / "password.sql").write_text(configs["password"]["content"])
        files = {"/role.sql": project / configs["role"]["file"], "/password.sql": tmp_path / "password.sql"}
        psql = [re.sub(r"(?<==)/.*", lambda path: str(files[path[0]]), word) for word in services["role"]["command"]]
        environment_of_role = environment("role", PGHOST="127.0.0.1", PGPORT=str(server.port), PATH=os.environ["PATH"])
        for _ in range(2):  # `up` runs it each time
            subprocess.run(psql, env=environment_of_role, check=True, stdout=subprocess.DEVNULL)

        ini = (project / configs["pgbouncer"]["file"]).read_text()
        for before, after in {
            "host=postgres": f"host=127.0.0.1 port={server.port}",
            "= *": "= 127.0.0.1",
            "6432": str(bouncer.port),
            "/etc/pgbouncer": str(bouncer.directory),
        }.items():
            assert before in ini
            ini = ini.replace(before, after)
        (bouncer.directory / "pgbouncer.ini").write_text(ini)
        (bouncer.directory / "userlist.txt").write_text(expand(configs["userlist"]["content"]))
        stack.callback(bouncer.stop)
        bouncer.start_configured()

        replicas = []
        for number in range(services["replica"]["deploy"]["replicas"]):
            port = str(free_port())
            settings = environment(
                "replica", ACME_BILLING_OPS_LISTEN=f"127.0.0.1:{port}", ACME_BILLING_POLLER_ENABLED="true"
            )
            with (tmp_path / f"{number}.log").open("w") as log:
                process = subprocess.Popen(
                    command(*entry, *images.config("localhost/poller")["Cmd"]), env=settings, stdout=log, stderr=log
                )
            stack.callback(process.wait)
            stack.callback(end, process)
            replicas.append((process, port))

        def logs() -> str:
            return "".join(path.read_text() for path in tmp_path.glob("*.log"))

        def healthy(port: str) -> bool:
            test = [word.replace("9464", port) for word in services["replica"]["healthcheck"]["test"][1:]]
            return (
                subprocess.run(command(*test), env=environment("replica"), capture_output=True, check=False).returncode
                == 0
            )

        def leader() -> str | None:
            done = subprocess.run(
                command(*entry, "status", "--json"),
                env=environment("replica"),
                capture_output=True,
                text=True,
                check=True,
            )
            (role,) = (role for role in json.loads(done.stdout)["roles"] if role["role"] == "poller")
            return role["holder"] if role["state"] == "leading" and len(role["standbys"]) == standbys else None

        for _, port in replicas:
            wait_until(lambda: healthy(port), 40, logs)  # noqa: B023
        standbys = 2
        first = wait_until(leader, 40, logs)
        # as process 1 of its own namespace it has no pid to tell it apart, so its log must
        (led,) = (number for number in range(3) if "lease.acquired" in (tmp_path / f"{number}.log").read_text())
        process, _ = replicas[led]
        (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^NSpid:.*\t1$", status, re.MULTILINE)
        assert re.search(r"^Uid:\t10001\t10001\t", status, re.MULTILINE)
        os.kill(int(pid), signal.SIGTERM)
        assert process.wait(40) == 0
        standbys = 1
        assert wait_until(leader, 40, logs) != first
        for other, _ in replicas:
            assert other.poll() in ((0,) if other is process else (None,))
