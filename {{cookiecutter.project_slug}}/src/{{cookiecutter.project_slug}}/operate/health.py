"""What the two probes ask: should this process be started again, and is it of use?"""

from ..lease.term import clock
from ..supervisor import Facts

# A turn of the loop takes an interval at most, but for the attempt to connect: a few seconds for each host and resolver.
TURN_SECONDS = 120.0


def not_live(facts: Facts, interval: float) -> str | None:
    """Why this process should be killed; None while it is well.

    A database that is away is no reason: started again, the process would fare no better.
    """
    for role in facts.roles:
        if role.overdue_seconds > 0:
            return f"still works as {role.role}, {role.overdue_seconds:.1f} s past the deadline of its lease"
    if facts.stopping or not facts.roles:
        return None
    if not facts.loop_alive:
        return "the loop of the lease has ended"
    if (silent := clock() - facts.journal.turned_at) > TURN_SECONDS + 2 * interval:
        return f"the loop of the lease has not gone round for {silent:.0f} s"
    return None


def not_ready(facts: Facts) -> str | None:
    """Why this replica could not lead, or would not; None where it leads, stands by, or has no worker turned on."""
    if facts.stopping:
        return "stopping"
    if facts.roles and facts.journal.connection != "open":
        return f"the lease's session: {facts.journal.connection}"
    return None
