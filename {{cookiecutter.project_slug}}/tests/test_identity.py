"""Names of replicas: unique, recognised again when PostgreSQL has cut them, and telling which roles they compete for."""

import socket

import pytest

from {{ cookiecutter.project_slug }}.keys import SERVICE, LeaseKey
from {{ cookiecutter.project_slug }}.lease.identity import application_name, competes_for, new_instance

FIRST = next(iter(LeaseKey))


def test_two_identities_of_one_process_differ() -> None:
    assert new_instance([FIRST]) != new_instance([FIRST])


def test_an_identity_tells_its_roles_even_when_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    for roles in ([], [FIRST], list(LeaseKey)):
        name = application_name(new_instance(roles))
        assert len(name) == 63
        assert [key for key in LeaseKey if competes_for(name, key)] == roles


def test_a_name_without_roles_competes_for_nothing() -> None:
    assert not competes_for(f"{SERVICE} 4711-0123abcd@host", FIRST)
