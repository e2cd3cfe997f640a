"""Who a replica is, in logs, in the lease row and in `pg_stat_activity`."""

import os
import re
import secrets
import socket
from collections.abc import Iterable

from ..keys import SERVICE, LeaseKey

_FIRST = min(LeaseKey)
_ROLES = re.compile(r"\.([0-9a-f]+)@")


def new_instance(roles: Iterable[LeaseKey]) -> str:
    """This process's identity: pid, a random part, its roles as bits, host.

    The random part tells it from one with the same pid and host after a reboot. The roles are there for `status`: a
    replica in which a role is turned off is no stand-by of it.
    """
    bits = sum(1 << (key - _FIRST) for key in roles)
    return f"{os.getpid()}-{secrets.token_hex(4)}.{bits:x}@{socket.gethostname()}"


def competes_for(instance: str, key: LeaseKey) -> bool:
    """Whether the replica with this identity competes for a role."""
    found = _ROLES.search(instance)
    return found is not None and bool(int(found[1], 16) >> (key - _FIRST) & 1)


def application_name(instance: str) -> str:
    """The name under which a lease session shows up in `pg_stat_activity`; PostgreSQL keeps 63 bytes."""
    return f"{SERVICE} {instance}".encode("ascii", "replace")[:63].decode()
