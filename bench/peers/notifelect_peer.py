"""notifelect, as its README shows it: work while the coordinator says that we won."""

import asyncio

import asyncpg
from notifelect.election_manager import Coordinator
from recording import UNIT_SECONDS, URL, begin, unit


async def main() -> None:
    conn = await asyncpg.connect(URL)
    async with Coordinator(conn) as election:
        file = None
        while True:
            await asyncio.sleep(UNIT_SECONDS)
            if election.winner:
                file = file or begin()
                unit(file)
            else:
                file = None


asyncio.run(main())
