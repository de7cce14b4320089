"""Who sent a request, in its scope."""

from __future__ import annotations

import pytest

from cluster.api.identity import ANONYMOUS, Identity, identity_of, set_identity


@pytest.mark.parametrize("scope", [{}, {"state": {}}, {"state": {"request_id": "x"}}])
def test_nobody_is_known_without_a_key(scope: dict[str, object]) -> None:
    assert identity_of(scope) is ANONYMOUS


def test_it_is_found_where_it_was_noted_and_nothing_else_is_lost() -> None:
    scope: dict[str, object] = {"state": {"request_id": "x"}}
    set_identity(scope, Identity("alice", "salt"))
    assert identity_of(scope) == Identity("alice", "salt")
    assert scope["state"]["request_id"] == "x"  # type: ignore[index]


def test_a_salt_is_not_shown() -> None:
    assert "pepper" not in repr(Identity("alice", "pepper"))
