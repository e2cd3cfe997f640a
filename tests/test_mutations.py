"""No safety rule of the lease can be broken without a test that fails."""

import pytest

import mutations


@pytest.mark.slow
@pytest.mark.needs("pgbouncer")
def test_each_broken_rule_is_noticed() -> None:
    assert mutations.main() == 0
