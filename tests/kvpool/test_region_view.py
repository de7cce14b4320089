from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvpool import Region, RegionMismatch, layout
from kvpool.region_view import RegionView, describe_file, regions_in

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig

WORD = 8


def overwrite(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(WORD * word)
        file.write(value.to_bytes(WORD, "little"))


def test_it_leaves_no_trace(rig: Rig) -> None:
    """No lock, no slot, no other age: an adopter comes in while somebody looks."""
    path = rig.region.path
    rig.cache([1, 2, 3, 4])
    geometry, fingerprint, owner = rig.geometry, rig.region.fingerprint, rig.region.owner
    os.utime(path, ns=(5, 5))
    with RegionView(path) as view:
        assert view.is_live()
        assert view.slot_is_live(rig.pool.slot)
        assert not view.slot_is_live(rig.pool.slot + 1)
        assert view.header.capacity_blocks == 8
        assert rig.region.alone()
        rig.close()
        assert not view.is_live()
        assert not view.slot_is_live(rig.pool.slot)
        assert path.stat().st_mtime_ns == 5
        assert view.unused_s() > 1e9
        adopted = Region.adopt(path, geometry=geometry, fingerprint=fingerprint, owner=owner)
        assert adopted is not None
        assert view.is_live()
        adopted.close()


def test_it_cannot_write(rig: Rig) -> None:
    with RegionView(rig.region.path) as view:
        with pytest.raises(TypeError, match="read-only"):
            view.control.state[0] = 1
        assert view.control.state[0] == rig.pool._control.state[0]
        with pytest.raises(ValueError, match="read-only"):
            view.control.array("state")[0] = 1
    view.close()


def test_it_closes_while_an_error_still_knows_an_array_of_it(rig: Rig) -> None:
    view = RegionView(rig.region.path)
    array = view.control.array("state")
    view.close()
    view.close()
    assert len(array) == 8


def test_a_region_that_goes_can_still_be_looked_at(rig: Rig) -> None:
    with RegionView(rig.region.path) as view:
        rig.region.unlink()
        assert view.control.state[7] & 0xFF == 1


@pytest.mark.parametrize(
    ("word", "value", "kind", "words"),
    [
        ("version", layout.LAYOUT_VERSION + 1, "other version", "layout version 3"),
        ("digest_low", 5, "other version", "another build"),
        ("capacity_blocks", 9, "damaged", "damaged header"),
    ],
)
def test_a_region_that_is_not_ours_says_so(rig: Rig, word: str, value: int, kind: str, words: str) -> None:
    path = rig.region.path
    kept = rig.pool._control.header[layout.HEADER_WORDS[word]]
    overwrite(path, layout.HEADER_WORDS[word], value)
    found = describe_file(path)
    assert found is not None
    assert (found.kind, found.file_bytes) == (kind, path.stat().st_size)
    assert words in found.problem
    with pytest.raises(RegionMismatch, match=words):
        RegionView(path)
    overwrite(path, layout.HEADER_WORDS[word], kept)


def test_what_is_in_a_directory(make_rig: MakeRig, tmp_path: Path) -> None:
    whole = make_rig().region.path
    home = whole.parent
    os.link(whole, home / "kvatlas-b")
    (home / "kvatlas-a.creating").write_bytes(b"")
    (home / "kvatlas-directory").mkdir()
    (home / "kvatlas-empty").write_bytes(b"")
    (home / "kvatlas-short").write_bytes(whole.read_bytes()[:100])
    (home / "kvatlas-truncated").write_bytes(whole.read_bytes()[:-1])
    (home / "kvatlas-text").write_text("not a region")
    (home / "kvatlas-to").symlink_to(whole)
    (home / "other").write_bytes(b"")
    found = {file.path.name: file.kind for file in regions_in(home, "kvatlas-")}
    assert found == {
        "kvatlas-a.creating": "half made",
        "kvatlas-b": "region",
        "kvatlas-short": "damaged",
        "kvatlas-to": "unreadable",
        "kvatlas-truncated": "damaged",
    }
    assert describe_file(tmp_path / "nothing") is None
