from __future__ import annotations

import pytest

from kvpool.directory import Space, WriteRefused


@pytest.mark.parametrize(
    ("cluster", "fingerprint", "block_tokens"),
    [("", "ab" * 8, 16), ("a}b", "ab" * 8, 16), ("a", "xyz", 16), ("a", "ab", 16), ("a", "ab" * 8, 0)],
)
def test_odd_names_of_spaces_are_refused(cluster: str, fingerprint: str, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="got"):
        Space(cluster, fingerprint, block_tokens)


def test_a_refusal_says_what_it_means() -> None:
    refused = WriteRefused("pool-1", "epoch", "another publisher has the fence")
    assert str(refused) == "the directory refused a write of pool 'pool-1' (epoch): another publisher has the fence"
    assert refused.fence_lost
    assert not WriteRefused("pool-1", "seq", "").fence_lost
