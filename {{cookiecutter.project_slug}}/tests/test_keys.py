"""The keys are part of the deployment interface: two releases that disagree on one have two leaders."""

import re
from pathlib import Path

import pytest

from {{cookiecutter.project_slug}}.keys import LeaseKey

LOCK_FILE = Path(__file__).parents[1] / "lease-keys.lock"


def frozen() -> dict[str, int]:
    """Name and number of each line of the lock file that is no comment."""
    lines = [line.split() for line in LOCK_FILE.read_text().splitlines() if line and not line.startswith("#")]
    names = [name for name, _ in lines]
    assert len(names) == len(set(names)), f"a role stands twice in {LOCK_FILE.name}: {sorted(names)}"
    return {name: int(key) for name, key in lines}


def test_no_key_was_changed_or_removed() -> None:
    current = {key.role: key.value for key in LeaseKey}
    changed = {name: key for name, key in frozen().items() if current.get(name) != key}
    assert not changed, (
        f"{changed} in {LOCK_FILE.name} must stay in keys.py as they are: during a deploy, replicas of the former"
        " release hold these keys. A role that is retired keeps its key; a role that changes gets a new name and key."
    )


def test_every_key_is_frozen() -> None:
    added = [f"{key.role} {key.value}" for key in LeaseKey if key.role not in frozen()]
    assert not added, f"freeze each new key with a line in {LOCK_FILE.name}, and commit it: {added}"


def test_a_number_once_used_is_never_used_again() -> None:
    keys = list(frozen().values())
    assert len(keys) == len(set(keys)), f"a key stands twice in {LOCK_FILE.name}: {sorted(keys)}"


@pytest.mark.parametrize("key", LeaseKey)
def test_pg_locks_shows_a_key_as_it_is(key: LeaseKey) -> None:
    assert 1 <= key < 2**32  # objid is an unsigned 32-bit number; a larger key would be split over classid and objid


@pytest.mark.parametrize("key", LeaseKey)
def test_a_role_names_an_extra_a_toggle_and_an_entry_point(key: LeaseKey) -> None:
    assert re.fullmatch("[A-Z][A-Z0-9_]*", key.name)
    assert LeaseKey.of(key.role) is key


def test_an_unknown_role_has_no_key() -> None:
    with pytest.raises(KeyError):
        LeaseKey.of("nobody")
