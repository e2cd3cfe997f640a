"""The tables of notifelect, as `python -m notifelect install` makes them."""

import asyncio

import asyncpg
from notifelect.queries import Queries
from recording import URL


async def main() -> None:
    await Queries(await asyncpg.connect(URL)).install()


asyncio.run(main())
