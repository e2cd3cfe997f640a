"""pgqueuer's worker with an entry point that inserts one row; with `install`, its tables."""

import asyncio
import os
import sys

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

BATCH = 500  # as many as this service takes at a time; 10 unless told otherwise


async def main() -> None:
    async with asyncpg.create_pool(os.environ["PEER_URL"], min_size=10, max_size=10) as pool:
        driver = AsyncpgPoolDriver(pool)
        if "install" in sys.argv:
            await Queries(driver).install()
            return
        queue = PgQueuer(driver)

        @queue.entrypoint("effect")
        async def effect(job: Job) -> None:
            await pool.execute("insert into public.effect (task) values ($1)", job.id)

        await queue.run(batch_size=BATCH)


asyncio.run(main())
