"""What is served beside a replica: the server and its clients, the two probes, the metrics."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from {{cookiecutter.project_slug}} import Lease, Worker
from {{cookiecutter.project_slug}}.config import ConfigError, Settings, load_settings
from {{cookiecutter.project_slug}}.gates import evaluate
from {{cookiecutter.project_slug}}.keys import ENV_PREFIX, SERVICE, LeaseKey
from {{cookiecutter.project_slug}}.lease.journal import Journal, RoleFacts
from {{cookiecutter.project_slug}}.lease.term import clock
from {{cookiecutter.project_slug}}.operate import endpoints as module
from {{cookiecutter.project_slug}}.operate.beside import paths, serving
from {{cookiecutter.project_slug}}.operate.endpoints import CLIENTS, Answer, Endpoints
from {{cookiecutter.project_slug}}.operate.health import TURN_SECONDS, not_live, not_ready
from {{cookiecutter.project_slug}}.supervisor import Facts, StopSignals, Supervisor

KEY = next(iter(LeaseKey))
QUICK = {"interval_seconds": 0.2, "ttl_seconds": 1.5, "stop_grace_seconds": 0.5, "drain_timeout_seconds": 30}


def until(condition: Callable[[], Any], what: str, timeout: float = 20) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)
    return value


def get(url: str, method: str = "GET", timeout: float = 10) -> tuple[int, str]:
    try:
        with urlopen(Request(url, method=method), timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as answer:
        with answer:
            return answer.code, answer.read().decode()


@contextmanager
def listening(paths: dict[str, Callable[[], Answer]], port: int = 0) -> Iterator[Endpoints]:
    subject = Endpoints("127.0.0.1", port, paths)
    thread = threading.Thread(target=subject.run, daemon=True)
    thread.start()
    try:
        yield subject
    finally:
        subject.stop()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def url() -> Iterator[str]:
    def fails() -> Answer:
        raise ZeroDivisionError("hunter2")

    with listening({"/good": lambda: Answer("good"), "/fails": fails}) as subject:
        yield until(lambda: subject.address, "it listens")


# -- the server


def test_a_path_is_answered_whatever_its_query(url: str) -> None:
    assert get(url + "good") == get(url + "good?x=1") == (200, "good")
    assert get(url + "good", "HEAD") == (200, "")


def test_an_unknown_path_is_told_which_there_are(url: str) -> None:
    assert get(url + "nowhere") == (404, "there is /good, /fails\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(url: str, method: str) -> None:
    assert get(url + "good", method)[0] == 501


def test_a_defect_is_an_answer_without_details(url: str) -> None:
    status, body = get(url + "fails")
    assert status == 500
    assert "hunter2" not in body
    assert "Traceback" not in body


def talk(url: str, words: bytes) -> bytes:
    host, port = re.findall(r"//(.*):(\d+)", url)[0]
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(words)
        client.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := client.recv(4096):
            received += chunk
        return received


@pytest.mark.parametrize("words", [
    b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET /good HTTP/1.1\r\nX",
    b"GET /" + b"a" * 70_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"\xff\x00" * 500,
])  # fmt: skip
def test_a_malformed_request_harms_nobody(url: str, words: bytes) -> None:
    try:
        answer = talk(url, words)
    except ConnectionResetError:
        answer = b""
    assert b"Traceback" not in answer
    assert get(url + "good") == (200, "good")


@contextmanager
def clients(url: str, number: int) -> Iterator[list[socket.socket]]:
    """Clients that say half a word, and then nothing."""
    host, port = re.findall(r"//(.*):(\d+)", url)[0]
    with ExitStack() as stack:
        yield [_client(stack, host, int(port)) for _ in range(number)]


def _client(stack: ExitStack, host: str, port: int) -> socket.socket:
    client = stack.enter_context(socket.create_connection((host, port), timeout=10))
    client.sendall(b"GE")
    return client


@pytest.mark.slow
def test_slow_clients_keep_nobody_out(url: str) -> None:
    with clients(url, 3 * CLIENTS):
        until(lambda: get(url + "good") == (200, "good"), "a probe is answered")
        before = threading.active_count()
        assert before < 3 * CLIENTS


@pytest.mark.slow
def test_a_slow_client_is_dropped_however_it_dribbles(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    with clients(url, 1) as (client,):
        started = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011 - a broken pipe or a reset
            while time.monotonic() < started + 10:
                client.sendall(b"T")
                client.settimeout(0.05)
                try:
                    if client.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    pass
        assert time.monotonic() - started < 5


def test_a_port_in_use_is_told_once_and_taken_once_it_is_free(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BIND_RETRY", 0.05)
    tries = 0
    bind = module._Server.server_bind

    def counted(server: module._Server) -> None:
        nonlocal tries
        tries += 1
        bind(server)

    monkeypatch.setattr(module._Server, "server_bind", counted)
    with listening({"/": lambda: Answer("first")}) as first:
        port = int(until(lambda: first.address, "it listens").rstrip("/").rpartition(":")[2])
        first_tries = tries
        with listening({"/": lambda: Answer("second")}, port) as second:
            until(lambda: tries > first_tries + 2, "the second tries")
            assert second.address is None
            assert capsys.readouterr().out.count("ops.unavailable") == 1
            first.stop()
            assert get(until(lambda: second.address, "the second listens")) == (200, "second")


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "a" * 64])
def test_an_address_that_is_not_ours_is_told(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    subject = Endpoints(host, 0, {})
    thread = threading.Thread(target=subject.run, daemon=True)
    thread.start()
    shown = ""

    def told() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return "ops.unavailable" in shown

    until(told, "it is told")
    subject.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_child_that_outlives_its_parent_does_not_keep_the_port() -> None:
    done, tell = os.pipe()
    with listening({}) as subject:
        port = int(until(lambda: subject.address, "it listens").rstrip("/").rpartition(":")[2])
        pid = os.fork()
        if pid == 0:
            os.write(tell, b".")
            signal.pause()
            os._exit(0)
        os.close(tell)
        assert not _free(port)
    try:
        assert os.read(done, 1) == b"."
        assert _free(port), "the child keeps it"
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


# -- settings


@pytest.mark.parametrize(
    "address", ["9464", "localhost", ":9464", "::1:9464", "h:65536", "h:-1", "h:٣", "tcp://10.0.0.1:80", "a b:1"]
)
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}OPS_LISTEN", address)
    with pytest.raises(ConfigError, match=f"{ENV_PREFIX}OPS_LISTEN: is no HOST:PORT: write 0.0.0.0:9464"):
        load_settings()


@pytest.mark.parametrize(("address", "meant"), [
    (None, ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0)), ("localhost:80", ("localhost", 80)), ("OFF", None),
])  # fmt: skip
def test_an_address_is_a_host_and_a_port(
    address: str | None, meant: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if address is not None:
        monkeypatch.setenv(f"{ENV_PREFIX}OPS_LISTEN", address)
    assert load_settings().ops_address == meant


def test_the_endpoints_can_be_turned_off() -> None:
    settings = Settings(database_url=SecretStr("host=x"), ops_listen="off")
    with serving(settings, [], Supervisor(settings, {})):
        assert "endpoints" not in {thread.name for thread in threading.enumerate()}


def test_they_listen_on_ipv6_too() -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):  # noqa: PTH110
        pytest.skip("no IPv6 here")
    subject = Endpoints("::1", 0, {"/": lambda: Answer("six")})
    thread = threading.Thread(target=subject.run, daemon=True)
    thread.start()
    assert get(until(lambda: subject.address, "it listens")) == (200, "six")
    subject.stop()
    thread.join(10)


# -- the probes

WELL = RoleFacts(KEY.role, "leading", leads=True, epoch=1, progress_age_seconds=1.0, overdue_seconds=0.0)


def facts(**changes: Any) -> Facts:
    journal = Journal("i", [KEY])
    journal.connection = "open"
    return replace(Facts("i", [WELL], journal, loop_alive=True, stopping=False), **changes)


def test_a_replica_that_leads_stands_by_or_has_nothing_to_do_is_live_and_ready() -> None:
    for roles in ([WELL], [replace(WELL, phase="standby", leads=False, progress_age_seconds=None)], []):
        assert not_live(facts(roles=roles), 1) is None
        assert not_ready(facts(roles=roles)) is None


@pytest.mark.parametrize("connection", ["unreachable", "lost", "refused", "not tried yet"])
def test_without_a_session_it_is_live_and_not_ready(connection: str) -> None:
    subject = facts()
    subject.journal.connection = connection
    assert not_live(subject, 1) is None
    assert not_ready(subject) == f"the lease's session: {connection}"


def test_a_worker_past_its_deadline_is_not_live_even_while_stopping() -> None:
    late = [replace(WELL, overdue_seconds=0.5)]
    assert "past the deadline" in str(not_live(facts(roles=late), 1))
    assert "past the deadline" in str(not_live(facts(roles=late, stopping=True), 1))


def test_a_loop_that_has_ended_or_hangs_is_not_live() -> None:
    assert "has ended" in str(not_live(facts(loop_alive=False), 1))
    hangs = facts()
    hangs.journal.turned_at = clock() - TURN_SECONDS - 3
    assert "has not gone round" in str(not_live(hangs, 1))
    assert not_live(hangs, 5) is None


def test_a_replica_that_drains_is_live_and_not_ready() -> None:
    assert not_live(facts(stopping=True, loop_alive=False), 1) is None
    assert not_ready(facts(stopping=True)) == "stopping"


# -- a whole replica


@contextmanager
def replica(database_url: str, workers: dict[str, Worker], **timing: float) -> Iterator[tuple[Supervisor, str]]:
    settings = Settings(database_url=SecretStr(database_url), **{**QUICK, **timing})  # type: ignore[arg-type]
    supervisor = Supervisor(settings, workers)
    with listening(paths(settings, evaluate(), supervisor)) as subject:
        thread = threading.Thread(target=supervisor.run, args=(StopSignals(),), daemon=True)
        thread.start()
        try:
            yield supervisor, until(lambda: subject.address, "it listens")
        finally:
            supervisor.stop()
            thread.join(20)
            assert not thread.is_alive()


def works(lease: Lease) -> None:
    while lease.wait(60):
        pass


def metrics(url: str) -> dict[tuple[str, str], float]:
    """Name and role, or the first other label, to value."""
    status, text = get(url + "metrics")
    assert status == 200
    return {
        (
            sample.name.removeprefix(f"{SERVICE}_"),
            sample.labels.get("role", next(iter(sample.labels.values()), "")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(SERVICE) and "le" not in sample.labels and "reason" not in sample.labels
    }


def test_a_leader_and_its_stand_by_are_both_ready_and_one_says_that_it_leads(database_url: str) -> None:
    with replica(database_url, {KEY.role: Worker(works)}) as (_, one):
        until(lambda: metrics(one)["lease_leader", KEY.role] == 1, "the first leads")
        with replica(database_url, {KEY.role: Worker(works)}) as (_, other):
            until(lambda: get(other + "readyz")[0] == 200, "the second is ready")
            assert get(one + "readyz") == get(other + "livez") == get(one + "livez") == (200, "ok\n")
            leader, standby = metrics(one), metrics(other)
    assert (leader["lease_leader", KEY.role], standby["lease_leader", KEY.role]) == (1, 0)
    assert (leader["lease_epoch", KEY.role], standby["lease_epoch", KEY.role]) == (1, 0)
    assert leader["lease_heartbeat_seconds_count", ""] > 0
    assert 0 <= leader["lease_heartbeat_age_seconds", ""] < 10
    assert 0 <= leader["worker_progress_age_seconds", KEY.role] < 60
    assert ("worker_progress_age_seconds", KEY.role) not in standby
    assert leader["session_open", ""] == standby["session_open", ""] == 1
    assert leader["session_refusals_total", "multiplexed"] == 0
    assert leader["lease_collision", KEY.role] == 0
    assert any(name == "build_info" for name, _ in leader)


def test_a_replica_without_workers_is_live_ready_and_has_its_build_to_tell(database_url: str) -> None:
    with replica(database_url, {}) as (_, url):
        assert get(url + "livez") == get(url + "readyz") == (200, "ok\n")
        assert {name for name, _ in metrics(url)} >= {"build_info", "session_open"}
        assert not any(name == "lease_leader" for name, _ in metrics(url))


def test_another_program_with_our_key_is_a_metric(database_url: str, conn: psycopg.Connection) -> None:
    conn.execute("select pg_advisory_lock(%s)", [KEY])
    with replica(database_url, {KEY.role: Worker(works)}) as (_, url):
        until(lambda: metrics(url)["lease_collision", KEY.role] == 1, "the collision is counted")
        conn.execute("select pg_advisory_unlock(%s)", [KEY])
        until(lambda: metrics(url)["lease_collision", KEY.role] == 0, "and gone")


def test_transitions_are_there_before_the_first_one(database_url: str) -> None:
    with replica(database_url, {KEY.role: Worker(works)}) as (_, url):
        text = get(url + "metrics")[1]
    labels = f'reason="asked to step down",role="{KEY.role}"'
    assert SERVICE + "_lease_transitions_total{" + labels + "} 0.0" in text


def test_while_a_worker_drains_the_endpoints_answer(database_url: str) -> None:
    goes_on = threading.Event()

    def lingers(lease: Lease) -> None:
        while lease.wait(60):
            pass
        goes_on.wait(60)

    with replica(database_url, {KEY.role: Worker(lingers)}) as (supervisor, url):
        until(lambda: metrics(url)["lease_leader", KEY.role] == 1, "it leads")
        supervisor.stop()
        assert get(url + "readyz") == (503, "stopping\n")
        assert get(url + "livez") == (200, "ok\n")
        assert metrics(url)["lease_leader", KEY.role] == 1, "it leads until its worker has ended"
        goes_on.set()
        until(lambda: metrics(url)["lease_leader", KEY.role] == 0, "it leads no more")


def test_without_a_database_it_is_live_and_says_what_is_missing() -> None:
    with replica("postgresql://u:hunter2@127.0.0.1:1/d", {KEY.role: Worker(works)}) as (_, url):
        until(lambda: get(url + "readyz") == (503, "the lease's session: unreachable\n"), "it says so")
        assert get(url + "livez") == (200, "ok\n")
        assert "hunter2" not in get(url + "metrics")[1]


@pytest.mark.slow
def test_a_crowd_of_readers_does_not_slow_the_lease(database_url: str) -> None:
    # a trust that outlasts what else this machine may be busy with: the measure is the time of ten heartbeats
    patient = replica(database_url, {KEY.role: Worker(works)}, ttl_seconds=6)
    with patient as (supervisor, url), clients(url, CLIENTS // 2):
        until(lambda: metrics(url)["lease_leader", KEY.role] == 1, "it leads")
        journal = supervisor.facts().journal
        before, started, scrapes = sum(journal.heartbeats), time.monotonic(), 0
        while sum(journal.heartbeats) < before + 10:
            assert metrics(url)["lease_leader", KEY.role] == 1
            scrapes += 1
        assert scrapes > 10
        assert time.monotonic() - started < 10 * QUICK["interval_seconds"] + 3
        assert json.dumps(journal.transitions[KEY.role, "acquired"]) == "1"


def test_an_async_worker_makes_progress_with_each_step(
    make_lease: Callable[[str, str], Lease],
    leading: Callable[[Worker, Lease], AbstractContextManager[None]],
    database_url: str,
) -> None:
    async def naps(lease: Lease) -> None:
        for _ in range(6000):
            await asyncio.sleep(0.01)

    lease = make_lease(KEY.role, database_url)
    with leading(Worker(naps), lease):
        lease._term.progress_at = 0.0
        until(lambda: lease._term.progress_at > 0, "a step is progress")
