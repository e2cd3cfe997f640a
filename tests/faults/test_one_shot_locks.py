"""One-shot locks through a real PgBouncer: the transaction's holds in every mode, the session's is refused."""

import itertools
import json
import subprocess
from collections.abc import Callable
from contextlib import closing

import psycopg
import pytest

from laboratory.environment import clean_environment
from laboratory.servers import PgBouncer, Postgres, wait_until
from laboratory.service import Service

pytestmark = pytest.mark.needs("pgbouncer")

Start = Callable[..., PgBouncer]

KEY = 42
CONTENDERS = 6

#: Each thread tries again and again; those who win say from when to when they worked.
CONTEND = f"""
import json, sys, threading, time, psycopg
from acme_billing.exclusive import exclusive_transaction
from acme_billing.log import configure

configure("info", "json")

def contend(number):
    until = time.monotonic() + 3
    with psycopg.connect(sys.argv[1], autocommit=True, prepare_threshold=None) as conn:
        while time.monotonic() < until:
            with exclusive_transaction(conn, {KEY}) as won:
                if won:
                    begun = time.monotonic()
                    conn.execute("select pg_sleep(0.01)")
                    print(json.dumps([begun, time.monotonic(), number]) + "\\n", end="", flush=True)
            time.sleep(0.005)

threads = [threading.Thread(target=contend, args=(number,)) for number in range({CONTENDERS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

HOLD = f"""
import sys, psycopg
from acme_billing import exclusive
from acme_billing.log import configure

configure("info", "json")
with psycopg.connect(sys.argv[1], autocommit=True, application_name=sys.argv[2]) as conn:
    with getattr(exclusive, sys.argv[3])(conn, {KEY}) as won:
        print(won, flush=True)
        sys.stdin.readline()
"""


def python(service: Service, code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [service.project / ".venv/bin/python", "-c", code, *arguments],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def no_lock_is_left(postgres: Postgres) -> None:
    with postgres.connect() as conn:
        held = "select count(*) from pg_locks where locktype = 'advisory'"
        wait_until(lambda: conn.execute(held).fetchone() == (0,), 10, "no lock is left")


@pytest.mark.parametrize("pool_size", [2, 20])
def test_no_two_work_at_once_behind_a_pooler_in_transaction_mode(
    service: Service, postgres: Postgres, pgbouncer: Start, pool_size: int
) -> None:
    with python(service, CONTEND, pgbouncer("transaction", pool_size).url()) as contest:
        out, err = contest.communicate(timeout=60)
    assert contest.returncode == 0, err
    worked = sorted(json.loads(line) for line in out.splitlines())
    assert all(former[1] <= later[0] for former, later in itertools.pairwise(worked))
    assert len({number for *_, number in worked}) > 1, "more than one had a turn"
    assert "exclusive.skipped" in err, "and met another who had it"
    no_lock_is_left(postgres)


def test_there_the_lock_of_a_session_is_given_to_two_at_once_so_it_is_refused(
    service: Service, pgbouncer: Start
) -> None:
    url = pgbouncer("transaction", 20).url()
    with (
        closing(psycopg.connect(url, autocommit=True)) as one,
        closing(psycopg.connect(url, autocommit=True)) as other,
    ):
        for conn in (one, other):
            assert conn.execute("select pg_try_advisory_lock(%s)", [KEY]).fetchone() == (True,)
    with python(service, HOLD, url, "me", "exclusive") as holder:
        out, err = holder.communicate(timeout=60)
    assert out == ""
    assert "Misuse: a pooler is in between" in err


def test_the_skip_names_the_holder_and_a_holder_that_is_killed_holds_it_no_longer(
    service: Service, postgres: Postgres, pgbouncer: Start
) -> None:
    url = pgbouncer("transaction", 20).url()
    with python(service, HOLD, url, "the holder", "exclusive_transaction") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with python(service, HOLD, url, "the other", "exclusive_transaction") as other:
            out, err = other.communicate("\n", timeout=60)
        assert out == "False\n"
        skip = json.loads(err)
        assert (skip["event"], skip["holder"]) == ("exclusive.skipped", "the holder")
        holder.kill()
    no_lock_is_left(postgres)
