from __future__ import annotations

from kvpool.directory import Snapshot, StoredSnapshot, Writer
from kvpool.directory.digest import digest_of
from router.mirror import Mirror
from router.mirror_check import check
from tests.fakes.speaker import key, packed


def test_missing_and_phantom_keys_are_named() -> None:
    mirror = Mirror()
    keys = packed([1, 2, 3])
    mirror.load(StoredSnapshot(Snapshot(Writer("a", 1, 1), 0, keys, digest_of(keys)), 0), 0.0)
    found = check(mirror, "a", [key(2), key(3), key(4)])
    assert (found.missing, found.phantom) == ((key(4),), (key(1),))
    assert found
    assert found.describe().startswith("pool 'a': 1 keys missing, 1 phantom ['0000")
    assert not check(mirror, "a", [key(1), key(2), key(3)])
    assert check(mirror, "b", [key(1)]).missing == (key(1),)
