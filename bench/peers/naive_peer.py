"""The loop of a blog post: try each five seconds, `select 1` each fifteen, psycopg's defaults."""

import logging
import threading
import time

import psycopg
from recording import URL, work

KEY, TRY_SECONDS, CHECK_SECONDS = 4711, 5.0, 15.0

while True:
    try:
        with psycopg.connect(URL, autocommit=True) as conn:
            while conn.execute("select pg_try_advisory_lock(%s)", [KEY]).fetchone() != (True,):
                time.sleep(TRY_SECONDS)
            leads = threading.Event()
            leads.set()
            worker = threading.Thread(target=work, args=(leads.is_set,))
            worker.start()
            try:
                while True:
                    time.sleep(CHECK_SECONDS)
                    conn.execute("select 1")
            finally:
                leads.clear()
                worker.join()
    except psycopg.Error:
        logging.exception("tried again")
        time.sleep(TRY_SECONDS)
