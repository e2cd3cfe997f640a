"""The first minute: a PostgreSQL from a wheel, three replicas, one leader a role, a takeover to watch."""

from .postgres import throwaway_postgres

__all__ = ["throwaway_postgres"]
