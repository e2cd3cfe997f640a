"""sqlalchemy-dlock, as its README shows it: a blocking lock around the work; an error is tried again after a second."""

import logging
import time

from recording import URL, work
from sqlalchemy import create_engine
from sqlalchemy_dlock import create_sadlock

engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"))
while True:
    try:
        with engine.connect() as conn, create_sadlock(conn, "leader"):
            work()
    except Exception:
        logging.exception("tried again")
        time.sleep(1)
