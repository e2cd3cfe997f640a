"""PALs, as its README shows it: a blocking lock around the work; an error is tried again after a second."""

import logging
import time

from pals import AcquireFailure, Locker
from recording import URL, work

locker = Locker("bench", URL.replace("postgresql://", "postgresql+psycopg://"))
while True:
    try:
        with locker.lock("leader"):
            work()
    except AcquireFailure:
        continue
    except Exception:
        logging.exception("tried again")
        time.sleep(1)
