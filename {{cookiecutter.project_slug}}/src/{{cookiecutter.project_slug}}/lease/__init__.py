"""Leadership as a lease: a PostgreSQL advisory lock with a time to live.

One replica at a time leads a role. It holds the role's session-level advisory lock on one dedicated connection and
proves each `interval`, in one statement for all roles, that the session is still its own and the locks still held.

    stand-by ──lock──▶ holding ──wait, epoch──▶ leading ──▶ ending ──mark, unlock, notify──▶ stand-by
                                                   └── session in doubt ──▶ lost ──worker has ended──▶ stand-by

**The rule.** A leader is a leader until `start of its last good heartbeat + trust`, on its own clock, and not one
heartbeat longer. Every outcome that it does not know, whether time-out, cancel, broken pipe, another server process,
another setting or a lock that is gone, means "not leader": the connection is closed, which releases.

**The times**, all counted from the start of the last good heartbeat (defaults in brackets):

    trust    the worker is told to stop                       kill - stop_grace         [2.5 s]
    kill     the process is ended if the worker still runs    horizon - margin          [4.5 s]
    horizon  a successor may start                            ttl - interval - margin   [4.75 s]
    ttl      the server ends the session                                                [6 s]

`interval * 2 < trust` is checked when the settings load. The kill is a timer in C and needs no GIL. The server's
`idle_session_timeout` starts later than our heartbeat did, so it never fires before `ttl`.

**Who may start, and when.** A lease row remembers the last term. Written on this timeline, and released cleanly, our own,
or with fenced effects only as ours: at once. Otherwise `horizon`, as promised in the predecessor's row, after the latest
moment at which it can have renewed:

- It was seen silent for longer than its own `trust`: from when that silence was first seen, since no heartbeat
  revives an expired term. So a host that is gone is succeeded as soon as the server ends its session.
- In all other cases, a killed process or a terminated session, from the moment in which the lock was won. What the
  stand-by saw one interval ago proves nothing, for the leader may have renewed right after it. The stand-by finds the
  free lock up to one interval late; that is why horizon is so much short of ttl, and it still starts within ttl.

**Clocks.** Durations only, on CLOCK_BOOTTIME, which counts suspend. Never compared between hosts; `margin` (ttl / 24)
covers different rates and a late wake-up. The wall clock plays no part, nor does the server's: of the time at which it last
heard the holder we only look whether it has changed.

**Epochs.** Each term has a higher one, committed before its worker starts. `Lease.transaction()` commits only while its
epoch is current, so a process that slept for an hour can't write. Outside the database send the epoch along.

**What fails, and then.**

    leader's process dies      lock free at once; successor within ttl (fenced: within two intervals)
    leader's host is gone      server ends the session after ttl; successor at its next heartbeat
    leader is paused           the same; when it wakes, it is past its deadline and the kill fires
    session is terminated      noticed within milliseconds; the worker is told, the replica competes again
    server restarts            the same; a replica's own former term needs no wait once its worker has ended
    fail-over of the server    the row's timeline differs: counts as unclean; a leader steps down
    pooler in transaction mode refused by the probe; should it change later, the next heartbeat's proof fails

What it can't do: two databases that both take writes; effects outside the database by a process paused in the instant
after its last check; exactly-once effects outside the database; the promise of a predecessor with a longer ttl whose row
a fail-over of the database has lost.

Modules: `decision` is the pure logic; `session` the connection and `statements` its SQL; `stability` the probe; `term`
what elector and worker share; `fencing` the fenced transaction; `watchdog` the last resort; `elector` the loop;
`identity` a replica's name; `journal` what happened, for the log and the metrics.
"""
