"""The whole API of a worker author."""

from .worker import Lease, LeaseLost, Worker

__all__ = ["Lease", "LeaseLost", "Worker"]
