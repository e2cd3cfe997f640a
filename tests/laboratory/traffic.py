"""Load beside what is tested."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from .servers import PgBouncer, Postgres, embedded_binaries


@contextmanager
def traffic(postgres: Postgres, bouncer: PgBouncer, clients: int, *options: str) -> Iterator[None]:
    """pgbench through the pooler, as fast as it can unless its options say otherwise."""
    pgbench = embedded_binaries() / "pgbench"
    subprocess.run([pgbench, "-i", "-q", postgres.url()], check=True, capture_output=True)
    with (bouncer.directory / "pgbench.log").open("wb") as log:
        load = subprocess.Popen(
            [pgbench, "-n", "-S", "-c", str(clients), "-T", "300", *options, bouncer.url()], stdout=log, stderr=log
        )
        try:
            yield
            assert load.poll() is None, "the load ended early: " + (bouncer.directory / "pgbench.log").read_text()
        finally:
            load.terminate()
            load.wait()
