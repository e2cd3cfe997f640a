"""procrastinate's worker with a task that inserts one row; with `install`, its tables.

Jobs run one at a time unless told otherwise. Sixteen at once were its fastest here (see docs/bench.md).
"""

import asyncio
import os
import sys

import procrastinate
from psycopg_pool import AsyncConnectionPool

URL = os.environ["PEER_URL"]
AT_ONCE = 16

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL, max_size=AT_ONCE))
pool = AsyncConnectionPool(URL, min_size=AT_ONCE, open=False, kwargs={"autocommit": True})


@app.task(name="effect", pass_context=True)
async def effect(context: procrastinate.JobContext) -> None:
    async with pool.connection() as conn:
        await conn.execute("insert into public.effect (task) values (%s)", [context.job.id])


async def main() -> None:
    async with app.open_async():
        if "install" in sys.argv:
            await app.schema_manager.apply_schema_async()
        else:
            async with pool:
                await app.run_worker_async(concurrency=AT_ONCE)


asyncio.run(main())
