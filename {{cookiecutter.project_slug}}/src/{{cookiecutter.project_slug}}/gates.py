"""The two gates: a worker runs only where its extra is installed and its toggle is on.

Entry points are read as metadata; nothing of a worker is imported before both its gates are open.
"""

import enum
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from .config import TOGGLE_SUFFIX, ConfigError, Settings, environment, nearest
from .keys import DISTRIBUTION, ENTRY_POINT_GROUP, ENV_PREFIX, LeaseKey
from .worker import Worker

BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("", "0", "false", "no", "off", "f", "n"), False),
}
NEAR_A_TOGGLE = 0.85  # <NAME>_ENABLD is meant as one (0.96), <NAME>_ENDPOINT (0.69) is not


class State(enum.StrEnum):
    """What the two gates make of a worker."""

    ABSENT = "absent"
    OFF = "off"
    OPEN = "open"
    REFUSED = "refused"


@dataclass(frozen=True)
class Gate:
    """One worker, or one toggle that belongs to none."""

    role: str
    key: int | None
    installed: bool
    toggle: str  # "unset", "on", "off", or the value that is neither
    state: State
    reason: str  # for people: why it does not run; empty where it does
    entry: EntryPoint | None = field(default=None, repr=False)


def evaluate() -> list[Gate]:
    """Both gates of every worker in the registry, installed, or named by a toggle. Imports and refuses nothing."""
    installed: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        installed[entry.name].append(entry)
    registry = [key.role for key in LeaseKey]
    roles = [*registry, *sorted(installed.keys() - set(registry))]
    toggles = _toggles(roles)
    known = [toggle_name(role) for role in roles]
    return [_gate(role, installed[role], toggles.get(toggle_name(role))) for role in roles] + [
        _unknown(name, value, known) for name, value in toggles.items() if name not in known
    ]


def open_workers(gates: Iterable[Gate]) -> dict[str, Worker]:
    """Import the workers whose two gates are open.

    Raises:
        ConfigError: every gate that is refused and every import that fails, all at once.
    """
    workers: dict[str, Worker] = {}
    problems: list[str] = []
    for gate in gates:
        if gate.state is State.REFUSED:
            problems.append(gate.reason)
        elif gate.state is State.OPEN and gate.entry is not None:
            try:
                workers[gate.role] = _load(gate.entry, f"{ENV_PREFIX}{toggle_name(gate.role)} is on, but")
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return workers


def load(role: str, command: str) -> Worker:
    """Import a worker for a command that somebody has typed, which is its gate: its toggle does not matter.

    Raises:
        ConfigError: it is not installed, its import fails, or another package claims to be it.
    """
    entries = [*entry_points(group=ENTRY_POINT_GROUP, name=role)]
    if not entries:
        install = install_command(role)
        raise ConfigError(f"`{command}` needs the worker {role}, which is not installed. Install it: {install}")
    if (foreign := _foreign(role, entries)) is not None:
        raise ConfigError(f"`{command}` needs the worker {role}, but {foreign}")
    return _load(entries[0], f"`{command}` needs the worker {role}, but")


def installed_workers(gates: Iterable[Gate]) -> dict[str, Worker]:
    """Import the workers that are installed, on or off, for `doctor`; one whose import fails is left out."""
    workers: dict[str, Worker] = {}
    for gate in gates:
        if gate.entry is not None:
            with suppress(ConfigError):
                workers[gate.role] = _load(gate.entry, "")
    return workers


def toggle_name(role: str) -> str:
    """A worker's toggle in the environment, without the prefix."""
    return f"{role.upper()}{TOGGLE_SUFFIX}"


def install_command(role: str) -> str:
    return f"uv sync --extra {role}, or: pip install '{DISTRIBUTION}[{role}]'"


def _toggles(roles: list[str]) -> dict[str, str]:
    """Everything in the environment that is a toggle or is meant as one."""
    names = [toggle_name(role) for role in roles]
    settings = {name.upper() for name in Settings.model_fields}
    return {
        name: value
        for name, value in environment().items()
        if name not in settings and ("ENABLE" in name or nearest(name, names, cutoff=NEAR_A_TOGGLE) is not None)
    }


def _gate(role: str, entries: list[EntryPoint], value: str | None) -> Gate:
    key = LeaseKey.of(role).value if role.upper() in LeaseKey.__members__ else None
    setting = f"{ENV_PREFIX}{toggle_name(role)}"
    wanted = False if value is None else BOOLEANS.get(value.strip().lower())
    if wanted is None:
        reason = f"{setting} is {value!r}, which is no boolean: use true or false"
        return Gate(role, key, bool(entries), str(value), State.REFUSED, reason)

    def gate(state: State, reason: str, entry: EntryPoint | None = None) -> Gate:
        toggle = "on" if wanted else "off" if value else "unset"
        return Gate(role, key, bool(entries), toggle, state, reason, entry)

    if not wanted:
        if not entries:
            return gate(State.ABSENT, f"not installed; to install it: {install_command(role)}")
        entry = entries[0] if _foreign(role, entries) is None else None
        return gate(State.OFF, f"to turn it on: {setting}=true", entry)
    if not entries:
        return gate(
            State.REFUSED, f"{setting} is on, but the worker is not installed. Install it: {install_command(role)}"
        )
    if (foreign := _foreign(role, entries)) is not None:
        return gate(State.REFUSED, f"{setting} is on, but {foreign}")
    if key is None:
        reason = f"{role} has no lease key: add one to LeaseKey in keys.py and to lease-keys.lock"
        return gate(State.REFUSED, f"{setting} is on, but {reason}")
    return gate(State.OPEN, "", entries[0])


def _foreign(role: str, entries: list[EntryPoint]) -> str | None:
    """What is wrong with who provides a worker; None if it is the one distribution that may."""
    expected = _normalised(f"{DISTRIBUTION}-{role}")
    providers = [_normalised(entry.dist.name) if entry.dist is not None else "an unknown package" for entry in entries]
    if providers == [expected]:
        return None
    if len(entries) > 1:
        return f"{len(entries)} entry points claim to be it, of {', '.join(sorted(providers))}: uninstall all but one"
    return f"the installed one is of the package {providers[0]}, not of {expected}: uninstall that package"


def _unknown(name: str, value: str, known: list[str]) -> Gate:
    roles = {toggle.removesuffix(TOGGLE_SUFFIX): toggle for toggle in known}
    meant = nearest(re.sub("_?ENABLED?_?", "", name), list(roles), cutoff=0.6)
    names = ", ".join(f"{ENV_PREFIX}{toggle}" for toggle in known)
    hint = f"did you mean {ENV_PREFIX}{roles[meant]}?" if meant else f"known are {names}"
    reason = f"{ENV_PREFIX}{name} is the toggle of no worker: {hint}"
    return Gate(name.removesuffix(TOGGLE_SUFFIX).lower(), None, False, value, State.REFUSED, reason)


def _load(entry: EntryPoint, but: str) -> Worker:
    try:
        worker = entry.load()
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = "".join(traceback.format_exception_only(error)).strip()
        raise ConfigError(
            f"{but} importing {entry.value} fails: {cause} ({where.filename}, line {where.lineno})"
        ) from error
    if not isinstance(worker, Worker):
        raise ConfigError(
            f"{but} {entry.value} is no Worker but of type {type(worker).__name__}: write worker = Worker(run)"
        )
    return worker


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
