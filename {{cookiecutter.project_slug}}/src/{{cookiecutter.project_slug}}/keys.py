"""The key registry: which role is guarded by which PostgreSQL advisory lock.

A key is part of the deployment interface. Old and new releases run side by side during a rolling
deploy and must agree on it, so keys are constants, never computed, and `lease-keys.lock` freezes them:
a test fails on any change but an addition.
"""

import enum

SERVICE = "{{ cookiecutter.project_slug }}"
DISTRIBUTION = "{{ cookiecutter.__distribution }}"
ENV_PREFIX = "{{ cookiecutter.__env_prefix }}"
ENTRY_POINT_GROUP = f"{SERVICE}.workers"

#: Channel on which a leader announces a free lease, and `step-down` asks for one.
CHANNEL = f"{SERVICE}.lease"

#: The numbers that no other service on this database uses. The first four are set aside by the template.
KEYS = range({{ cookiecutter.lease_key_base }}, {{ cookiecutter.lease_key_base | int + 256 }})

#: Of these `verify` takes one for some seconds. They are keys, and no role has them.
VERIFY_KEYS = KEYS[-32:]


@enum.unique
class LeaseKey(enum.IntEnum):
    """One advisory-lock key a role: positive and under 2**32, so `pg_locks.objid` shows it as it is."""
{% for name, key in cookiecutter.workers | lease_keys(cookiecutter.lease_key_base) %}
    {{ name | upper }} = {{ key }}
{%- endfor %}

    @property
    def role(self) -> str:
        """The name that the worker, its extra and its toggle share."""
        return self.name.lower()

    @classmethod
    def of(cls, role: str) -> "LeaseKey":
        """The key of a role.

        Raises:
            KeyError: no such role in the registry.
        """
        return cls[role.upper()]

    @classmethod
    def _missing_(cls, value: object) -> "LeaseKey | None":
        if not isinstance(value, int) or value not in VERIFY_KEYS:
            return None
        key = int.__new__(cls, value)
        key._name_, key._value_ = "VERIFY", value
        return key
