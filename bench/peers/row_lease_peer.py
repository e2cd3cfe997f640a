"""A row with an expiry, renewed in place: Kubernetes' defaults (15 s lease, 10 s renew deadline, tried each 2 s)."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import psycopg
from recording import URL, work

LEASE_SECONDS, RENEW_DEADLINE, RETRY_SECONDS = 15.0, 10.0, 2.0
ME = f"{socket.gethostname()}-{os.getpid()}"
CREATE = "create table if not exists row_lease (name text primary key, holder text, expires_at timestamptz)"
RENEW = """
insert into row_lease values ('leader', %(me)s, now() + make_interval(secs => %(seconds)s))
on conflict (name) do update set holder = excluded.holder, expires_at = excluded.expires_at
 where row_lease.holder = excluded.holder or row_lease.expires_at < now()
"""
RELEASE = "update row_lease set expires_at = now() where holder = %s"


def connect() -> psycopg.Connection:
    return psycopg.connect(URL, autocommit=True, connect_timeout=5, prepare_threshold=None)


class Term:
    """A term: it ends at the deadline whether or not the database answers."""

    def __init__(self) -> None:
        self.until = 0.0
        self.worker: threading.Thread | None = None

    def leads(self) -> bool:
        return time.monotonic() < self.until

    def renewed(self, asked_at: float) -> None:
        self.until = asked_at + RENEW_DEADLINE
        if self.worker is None or not self.worker.is_alive():
            self.worker = threading.Thread(target=work, args=(self.leads,), daemon=True)
            self.worker.start()


def stop(_number: int, _frame: FrameType | None) -> None:
    term.until = 0.0
    if term.worker is not None:
        term.worker.join()
        with connect() as conn:
            conn.execute(RELEASE, [ME])
    sys.exit(0)


term = Term()
signal.signal(signal.SIGTERM, stop)
conn: psycopg.Connection | None = None
while True:
    asked_at = time.monotonic()
    try:
        if conn is None:
            conn = connect()
            conn.execute(CREATE)
        done = conn.execute(RENEW, {"me": ME, "seconds": LEASE_SECONDS})
        if done.rowcount:
            term.renewed(asked_at)
        else:
            term.until = 0.0
    except psycopg.Error:
        logging.exception("tried again")
        conn = None
    time.sleep(RETRY_SECONDS)
