"""The bodies that the laboratory gives to a baked project's three workers: each records what it does.

`{{slug}}` is replaced by the project's package. One line a unit of work: its start, its end, and a dot that shows the
line is whole. A unit is done right after a check, as the documentation asks of work that reaches outside.
"""

HEAD = '''
import asyncio
import os
import time
from pathlib import Path

from @SLUG@ import Lease, Worker


def record(lease: Lease):
    path = Path(os.environ["RECORD_DIRECTORY"]) / f"{lease.role}.{os.getpid()}.{lease.epoch}.record"
    return path.open("a", buffering=1)


def unit(file) -> None:
    start = time.monotonic()
    file.write(f"{start:.6f} {time.monotonic():.6f} .\\n")

'''

EXTERNAL = HEAD + '''
def run(lease: Lease) -> None:
    with record(lease) as file:
        while lease.wait(0.003):
            unit(file)


worker = Worker(run)
'''

FENCED = HEAD + '''
INSERT = "insert into public.fenced_writes (epoch, instance) values (%s, %s)"


def run(lease: Lease) -> None:
    with record(lease) as file:
        while lease.wait(0.003):
            with lease.transaction() as conn:
                conn.execute(INSERT, [lease.epoch, lease.instance])
            unit(file)


worker = Worker(run, effects="fenced")
'''

ASYNC_EXTERNAL = HEAD + '''
async def run(lease: Lease) -> None:
    with record(lease) as file:
        while True:
            await asyncio.sleep(0.003)
            lease.check()
            unit(file)


worker = Worker(run)
'''
