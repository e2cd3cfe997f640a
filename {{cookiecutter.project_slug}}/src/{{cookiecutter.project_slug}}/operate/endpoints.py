"""A small HTTP server beside the work: it waits for nobody, and nobody waits for it.

A client gets `PATIENCE` seconds in all, however slowly it talks. Where `CLIENTS` are being served, the oldest of them
makes room for the next, so that nobody can keep a probe out. Nothing here takes a lock that the lease or a worker needs.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

import structlog

from ..keys import ENV_PREFIX, SERVICE
from ..lease.session import Wake

PATIENCE = 10.0  # seconds for one client; a page waits for the database for up to half of that
CLIENTS = 16
BIND_RETRY = 5.0  # seconds

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a path answers."""

    body: str
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


class Endpoints:
    """Serves paths over HTTP, until stopped.

    An address that can't be had (in use by another replica of this host, say) is told once and tried for again: the
    lease's work does not depend on it. Start it once; `stop` may come before, during and after, from any thread, any
    number of times.

    Args:
        host, port: where to listen; port 0 is any free one, told in the log.
        paths: called for each request, in a thread of its own.
    """

    def __init__(self, host: str, port: int, paths: Mapping[str, Callable[[], Answer]]) -> None:
        self.address: str | None = None  # while it listens
        self._host = host
        self._port = port
        self._paths = paths
        self._stopping = threading.Event()
        self._wake = Wake()

    def stop(self) -> None:
        """Stop listening; answers that are on their way are left alone."""
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        """Serve until stopped."""
        told = ""
        while not self._stopping.is_set():
            try:
                with _Server(self._host, self._port, self._paths) as server:
                    self.address = server.url
                    log.info("ops.listening", url=self.address)
                    self._serve(server)
            except (OSError, UnicodeError) as error:  # the latter: a name that can be no host's
                if told != (told := str(error)):
                    hint = f"set {ENV_PREFIX}OPS_LISTEN to an address of this host; port 0 is any free one, off turns it off"
                    log.warning("ops.unavailable", host=self._host, port=self._port, reason=told, hint=hint)
                self._wake.wait(BIND_RETRY)
            finally:
                self.address = None

    def _serve(self, server: "_Server") -> None:
        while not self._stopping.is_set():
            ready, _, _ = select.select([server.fileno(), self._wake.fileno()], [], [], 1.0)
            if server.fileno() in ready:
                server.handle_request()
            server.drop_the_slow()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = CLIENTS

    def __init__(self, host: str, port: int, paths: Mapping[str, Callable[[], Answer]]) -> None:
        self.paths = paths
        self._clients: dict[Any, float | None] = {}  # connections, each with its end; None: it was told to end
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        _listening.add(self)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if self.address_family == socket.AF_INET6 else f"http://{host!s}:{port}/"

    def server_bind(self) -> None:
        # not HTTPServer's, which asks DNS for our own name
        super(HTTPServer, self).server_bind()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # no descriptor is left: the client stays in the queue, and we must not spin
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._clients) >= 2 * CLIENTS:  # even those told to end have not all ended yet
            self.shutdown_request(request)
            return
        if len(self._clients) >= CLIENTS:
            self._drop(next((one for one, end in list(self._clients.items()) if end is not None), None))
        self._clients[request] = time.monotonic() + PATIENCE
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def drop_the_slow(self) -> None:
        for request, end in list(self._clients.items()):
            if end is not None and time.monotonic() > end:
                self._drop(request)

    def _drop(self, request: Any) -> None:
        if request in self._clients:
            self._clients[request] = None
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("ops.client_failed", client=client_address[0], error=repr(sys.exception()))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = SERVICE
    sys_version = ""
    timeout = PATIENCE

    # the library's names
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answer = Answer(f"there is {', '.join(self.server.paths)}\n", 404)
        if path in self.server.paths:
            try:
                answer = self.server.paths[path]()
            except Exception:
                log.exception("ops.failed", path=path)
                answer = Answer("failed; the log says why\n", 500)
        body = answer.body.encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        log.debug("ops.request", client=self.client_address[0], line=format % args)


_listening: "weakref.WeakSet[_Server]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A child that outlives its parent must not keep its port."""
    for server in list(_listening):
        server.socket.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
