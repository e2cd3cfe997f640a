"""asyncpg-lock, as its README shows it."""

import asyncio

from asyncpg_lock import AdvisoryLockGuard, connect_func
from recording import URL, work_until_cancelled

asyncio.run(AdvisoryLockGuard(connect=connect_func(URL)).run(4711, work_until_cancelled))
