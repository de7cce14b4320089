from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvpool import BlockGeometry, Pool, PoolError, Region, words

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


def test_the_life_of_a_request(rig: Rig) -> None:
    tokens = [1, 2, 3, 4, 5]
    first = rig.run("first", tokens)
    assert (len(first.blocks), first.keys) == (3, rig.keys(tokens))
    assert rig.pool.release(first) == 3
    second = rig.pool.table("second")
    assert rig.pool.match(second, rig.keys(tokens), tokens) == 2
    assert second.keys == rig.keys(tokens)
    assert rig.pool.allocate(second, 1)
    assert rig.pool.held_blocks() == 3
    assert rig.pool.release(second) == 3
    assert (second.blocks, second.keys, second.closed) == ([], [], True)
    assert rig.pool.held_blocks() == 0


def test_t3_finish_and_abort_both_release(rig: Rig) -> None:
    table = rig.run("r", [1, 2, 3])
    assert rig.pool.release(table) == 2
    free = rig.pool.available()
    assert rig.pool.release(table) == 0
    assert rig.pool.force_release(table, "abort") == 0
    stats = rig.pool.stats()
    assert (rig.pool.available(), stats.second_releases, stats.forced_releases) == (free, 2, {})
    assert sum(stats.blocks.values()) == 8


def test_t4_a_block_reached_by_two_ways_is_counted_once(rig: Rig) -> None:
    """Two tables hold the same blocks; releasing both frees each block once, and only after the second."""
    one, other = rig.run("one", [1, 2, 3, 4]), rig.run("other", [1, 2, 3, 4])
    assert one.blocks == other.blocks
    assert rig.pool.held_blocks() == 2
    rig.pool.release(one)
    assert rig.pool.held_blocks() == 2
    assert rig.pool.available() == 6
    rig.pool.release(other)
    assert rig.pool.available() == 8


def test_t9_too_few_blocks_changes_nothing(rig: Rig) -> None:
    rig.cache([1, 2, 3, 4])
    held = rig.run("held", [5, 6, 7])
    table = rig.pool.table("r")
    before = rig.pool.stats()
    assert not rig.pool.allocate(table, 7)
    after = rig.pool.stats()
    assert (table.blocks, after.evictions, after.open_tables) == ([], before.evictions, before.open_tables)
    assert (rig.pool.available(), rig.pool.held_blocks()) == (6, 2)
    assert {name: after.blocks[name] for name in ("mutable", "sealed", "held", "cached")} == {
        name: before.blocks[name] for name in ("mutable", "sealed", "held", "cached")
    }
    assert (before.allocation_failures["full"], after.allocation_failures["full"]) == (0, 1)
    assert rig.pool.check_integrity() == ""
    assert rig.pool.allocate(table, 6)
    assert len(set(table.blocks) | set(held.blocks)) == 8
    rig.pool.release(table)
    rig.pool.release(held)


def test_t10_what_was_matched_is_not_evicted_by_the_allocation_that_follows(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=4)
    tokens = [1, 2, 3, 4]
    rig.cache(tokens)
    rig.cache([7, 8])
    table = rig.pool.table("r")
    assert rig.pool.match(table, rig.keys(tokens)) == 2
    assert not rig.pool.allocate(table, 3)
    assert rig.pool.peek(rig.keys([7, 8])) == 1
    assert rig.pool.allocate(table, 2)
    assert rig.pool.peek(rig.keys(tokens)) == 2
    assert rig.pool.peek(rig.keys([7, 8])) == 0
    assert len(set(table.blocks)) == 4
    rig.pool.release(table)


@pytest.mark.parametrize("block_tokens", [1, 2, 5])
def test_t23_a_prompt_of_whole_blocks_is_matched_whole(make_rig: MakeRig, block_tokens: int) -> None:
    """The engine then recomputes the last token into a copy of the tail; the pool gives it the copy."""
    rig = make_rig(8, block_tokens)
    tokens = list(range(2 * block_tokens))
    rig.cache(tokens)
    table = rig.pool.table("again")
    assert rig.pool.match(table, rig.keys(tokens), tokens) == 2
    pair = rig.pool.copy_on_write(table, 1)
    assert pair is not None
    source, target = pair
    assert source != target == table.blocks[1]
    assert len(table.keys) == 1
    rig.pool.finish_copy(table)
    assert rig.pool.seal(table, 1, rig.keys(tokens)[1], tokens[block_tokens:]) == source
    assert rig.pool.stats().dedups == 1
    rig.pool.release(table)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_t24_lengths_around_a_block_boundary(make_rig: MakeRig, size: int) -> None:
    rig = make_rig(8, size)
    for length in {size - 1, size, size + 1, 2 * size} - {0}:
        table = rig.run("r", list(range(10, 10 + length)))
        assert len(table.blocks) == -(-length // size)
        assert len(table.keys) == length // size
        rig.pool.release(table)
        rig.pool.reset()


def test_copy_on_write_of_a_shared_tail(rig: Rig) -> None:
    tokens = [1, 2, 3, 4]
    rig.cache(tokens)
    one, other = rig.pool.table("one"), rig.pool.table("other")
    rig.pool.match(one, rig.keys(tokens))
    rig.pool.match(other, rig.keys(tokens))
    pair = rig.pool.copy_on_write(one, 1)
    assert pair == (other.blocks[1], one.blocks[1])
    rig.pool.release(other)
    assert rig.pool.evict(9) == 0  # the source is held until it is copied
    assert rig.pool.check_integrity() == ""
    rig.pool.finish_copy(one)
    rig.pool.finish_copy(one)
    assert rig.pool.evict(9) == 1
    assert rig.pool.stats().cow_copies == 1
    assert rig.pool.copy_on_write(one, 1) == (one.blocks[1], one.blocks[1])
    assert rig.pool.release(one) == 2


def test_release_lets_go_of_an_unfinished_copy(rig: Rig) -> None:
    rig.cache([1, 2])
    table = rig.pool.table("r")
    rig.pool.match(table, rig.keys([1, 2]))
    assert rig.pool.copy_on_write(table, 0) is not None
    assert rig.pool.release(table) == 2
    assert rig.pool.held_blocks() == 0
    assert rig.pool.peek(rig.keys([1, 2])) == 1


def test_sealing_the_copy_finishes_it(rig: Rig) -> None:
    """The copy ends up equal to its source: the table returns to the source, once."""
    rig.cache([1, 2])
    table = rig.pool.table("r")
    rig.pool.match(table, rig.keys([1, 2]))
    pair = rig.pool.copy_on_write(table, 0)
    assert pair is not None
    assert rig.pool.seal(table, 0, rig.keys([1, 2])[0], [1, 2]) == pair[0]
    assert rig.pool.check_integrity() == ""
    assert (table.blocks, rig.pool.held_blocks()) == ([pair[0]], 1)
    assert rig.pool.release(table) == 1


def test_two_copies_in_one_table(rig: Rig) -> None:
    tokens = [1, 2, 3, 4]
    rig.cache(tokens)
    table = rig.pool.table("r")
    rig.pool.match(table, rig.keys(tokens))
    assert rig.pool.copy_on_write(table, 1) is not None
    assert rig.pool.copy_on_write(table, 0) is not None
    assert rig.pool.check_integrity() == ""
    assert rig.pool.held_blocks() == 4
    rig.pool.finish_copy(table)
    assert rig.pool.held_blocks() == 2
    assert rig.pool.reset() == 2
    rig.pool.release(table)


def test_copy_without_room_changes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=2)
    table = rig.run("r", [1, 2, 3, 4])
    blocks, keys = list(table.blocks), list(table.keys)
    assert rig.pool.copy_on_write(table, 1) is None
    assert (table.blocks, table.keys) == (blocks, keys)
    assert rig.pool.stats().cow_copies == 0
    rig.pool.release(table)


def test_copy_before_a_shared_block_is_refused(rig: Rig) -> None:
    table = rig.run("r", [1, 2, 3, 4, 5])
    with pytest.raises(PoolError, match="sealed blocks after position 0"):
        rig.pool.copy_on_write(table, 0)
    with pytest.raises(PoolError, match="has 3 blocks, no position 3"):
        rig.pool.copy_on_write(table, 3)
    rig.pool.release(table)


def test_force_release_raises_an_alarm(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    table = rig.run("req-7", [1, 2, 3])
    with caplog.at_level(logging.WARNING, logger="kvpool.pool"):
        assert rig.pool.force_release(table, "step failed") == 2
    (record,) = caplog.records
    assert record.getMessage() == "forced release of 2 blocks of req-7 (step failed): [1, 0]"
    assert rig.pool.stats().forced_releases == {"step failed": 1}
    assert rig.pool.held_blocks() == 0


def test_seal_in_order_and_only_own_blocks(rig: Rig) -> None:
    keys = rig.keys([1, 2, 3, 4])
    table = rig.pool.table("r")
    with pytest.raises(PoolError, match="position 0 is not the next one"):
        rig.pool.seal(table, 0, keys[0], [1, 2])
    assert rig.pool.allocate(table, 2)
    with pytest.raises(PoolError, match="0 of 2 blocks sealed; position 1 is not the next one"):
        rig.pool.seal(table, 1, keys[1], [3, 4])
    with pytest.raises(ValueError, match="2 token ids, got 16 and 1"):
        rig.pool.seal(table, 0, keys[0], [1])
    with pytest.raises(ValueError, match="key of 16 bytes"):
        rig.pool.seal(table, 0, b"short", [1, 2])
    rig.pool.seal(table, 0, keys[0], [1, 2])
    with pytest.raises(PoolError, match="1 of 2 blocks sealed; position 0 is not the next one"):
        rig.pool.seal(table, 0, keys[0], [1, 2])
    rig.pool.release(table)


def test_match_wants_an_empty_table_and_enough_tokens(rig: Rig) -> None:
    table = rig.run("r", [1, 2])
    with pytest.raises(PoolError, match="'r' has 1 blocks already; match comes first"):
        rig.pool.match(table, rig.keys([1, 2]))
    empty = rig.pool.table("e")
    with pytest.raises(ValueError, match="2 keys need 4 token ids, got 3"):
        rig.pool.match(empty, rig.keys([1, 2, 3, 4]), [1, 2, 3])
    rig.pool.release(table)


def test_a_closed_table_is_refused_everywhere(rig: Rig) -> None:
    table = rig.run("r", [1, 2])
    rig.pool.release(table)
    for use in (
        lambda: rig.pool.allocate(table, 1),
        lambda: rig.pool.match(table, []),
        lambda: rig.pool.seal(table, 0, bytes(16), [1, 2]),
        lambda: rig.pool.copy_on_write(table, 0),
        lambda: rig.pool.finish_copy(table),
    ):
        with pytest.raises(PoolError, match="the table of 'r' is closed"):
            use()


def test_allocate_nothing_and_less(rig: Rig) -> None:
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 0)
    with pytest.raises(ValueError, match="cannot allocate -1 blocks"):
        rig.pool.allocate(table, -1)
    assert rig.pool.stats().open_tables == 0


def test_numbers_below_zero_change_nothing(rig: Rig) -> None:
    """A count or a position below zero is refused, or is none; it never counts backwards."""
    rig.cache([1, 2, 3, 4])
    table = rig.run("r", [1, 2, 3, 4, 5])
    before = rig.pool.stats()
    blocks, keys = table.blocks, list(table.keys)
    for refused, why, call in (
        (ValueError, "cannot allocate -1", lambda: rig.pool.allocate(table, -1)),
        (PoolError, "no position -1", lambda: rig.pool.copy_on_write(table, -1)),
        (PoolError, "position -1 is not the next", lambda: rig.pool.seal(table, -1, bytes(16), [5, 6])),
        (ValueError, "-1 of 3 tokens", lambda: rig.pool.count_prefix(3, -1)),
        (ValueError, "-1 of -1 tokens", lambda: rig.pool.count_prefix(-1, -1)),
    ):
        with pytest.raises(refused, match=why):
            call()
    assert rig.pool.evict(-5) == 0
    assert rig.pool.stats() == before
    assert (table.blocks, table.keys) == (blocks, keys)
    rig.pool.release(table)


def test_peek_holds_and_counts_nothing(rig: Rig) -> None:
    rig.cache([1, 2, 3, 4])
    before = rig.pool.stats()
    assert rig.pool.peek(rig.keys([1, 2, 3, 4, 5, 6])) == 2
    assert rig.pool.peek([]) == 0
    assert rig.pool.stats() == before


def test_close_takes_back_what_is_still_held(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    table = rig.run("late", [1, 2, 3])
    with caplog.at_level(logging.WARNING, logger="kvpool.pool"):
        rig.pool.close()
    assert "forced release of 2 blocks of late (pool closed)" in caplog.text
    rig.pool.close()
    assert table.closed
    assert rig.pool.release(table) == 0
    for use in (rig.pool.stats, rig.pool.available, lambda: rig.pool.allocate(table, 1)):
        with pytest.raises(PoolError, match="is closed in this process"):
            use()
    with Pool.create(rig.region) as again:
        assert again.stats().blocks == {"free": 7, "local": 0, "mutable": 0, "sealed": 0, "held": 0, "cached": 1}
    rig.region.close()


def test_closing_the_region_first_is_survived(rig: Rig) -> None:
    table = rig.run("r", [1, 2])
    rig.region.close()
    with pytest.raises(PoolError, match="is closed in this process"):
        rig.pool.allocate(table, 1)
    rig.pool.close()
    assert rig.pool.release(table) == 0


def test_a_closed_pool_and_region_are_really_unmapped(tmp_path: Path) -> None:
    region = Region.create(tmp_path, "gone", BlockGeometry(1, 1, 4, 2, "float32"), 8, bytes(32), random.Random(0))
    pool = Pool.create(region)
    pool.stats()
    pool.check_integrity()
    pool.close()
    region.close()
    assert str(region.path) not in Path("/proc/self/maps").read_text()


def test_the_highest_block_and_the_last_bit(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=65)
    table = rig.pool.table("all")
    assert rig.pool.allocate(table, 65)
    assert sorted(table.blocks) == list(range(65))
    assert not rig.pool.allocate(table, 1)
    assert rig.pool.check_integrity() == ""
    rig.pool.release(table)


def test_several_bitmap_words(make_rig: MakeRig) -> None:
    """Whatever order blocks come back in, all of them are handed out again, each once."""
    rig = make_rig(capacity_blocks=130)
    tables = [rig.pool.table(f"r{number}") for number in range(13)]
    for table in tables:
        assert rig.pool.allocate(table, 10)
    assert sorted(block for table in tables for block in table.blocks) == list(range(130))
    for table in tables[::2]:
        rig.pool.release(table)
    with rig.pool.table("again") as again:
        assert rig.pool.allocate(again, 70)
        assert not rig.pool.allocate(again, 1)
        assert len({*again.blocks, *(block for table in tables for block in table.blocks)}) == 130
    for table in tables[1::2]:
        rig.pool.release(table)


def test_the_first_four_given_back_stay_with_the_process(rig: Rig) -> None:
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 6)
    control = rig.region.control()
    lives = {block: words.generation_of(control.state[block]) for block in table.blocks}
    states = {words.state_of(control.state[block]) for block in table.blocks}
    owners = {words.owner_of(control.state[block]) for block in table.blocks}
    assert (states, owners) == ({words.MUTABLE}, {rig.pool.slot})
    rig.pool.release(table)
    assert {name: rig.pool.stats().blocks[name] for name in ("local", "free")} == {"local": 4, "free": 4}
    local = {block for block in lives if words.state_of(control.state[block]) == words.LOCAL}
    assert len(local) == 4
    assert all(words.generation_of(control.state[block]) == life + 1 for block, life in lives.items())
    with rig.pool.table("again") as again:
        assert rig.pool.allocate(again, 4)
        assert set(again.blocks) == local
    rig.pool.close()
    assert [words.state_of(word) for word in control.state] == [words.FREE] * 8
    assert control.free[0] == 0xFF
    control.release()
    rig.region.close()


def test_a_free_bit_is_only_a_hint(rig: Rig) -> None:
    """Bits of blocks in use are passed over, and put right by the next pass."""
    with rig.pool.table("r") as table:
        assert rig.pool.allocate(table, 2)
        control = rig.region.control()
        control.free[0] = 0xFF
        with rig.pool.table("other") as other:
            assert rig.pool.allocate(other, 6)
            assert len({*table.blocks, *other.blocks}) == 8
            assert not rig.pool.allocate(other, 1)
            rig.pool.tidy()
            assert control.free[0] == 0
            assert rig.pool.check_integrity() == ""
        control.release()


def test_a_lost_free_bit_costs_no_block(rig: Rig) -> None:
    control = rig.region.control()
    control.free[0] = 0b1
    with rig.pool.table("r") as table:
        assert rig.pool.allocate(table, 8)
        assert rig.pool.check_integrity() == ""
    control.free[0] = 0
    assert rig.pool.tidy().restored_bits == 4  # the other four are in the local cache
    assert rig.pool.check_integrity() == ""
    control.release()


def test_two_processes_that_see_the_same_room(rig: Rig) -> None:
    """What is free is a hint: of two that go by it one gets nothing, is told so, and may have the rest."""
    with Region.attach(rig.region.path) as region, Pool.create(region) as other:
        assert rig.pool.available() == other.available() == 8
        first, second = rig.pool.table("first"), other.table("second")
        assert rig.pool.allocate(first, 7)
        assert not other.allocate(second, 7)
        assert (second.blocks, other.held_blocks()) == ([], 0)
        assert other.stats().allocation_failures == {"full": 1, "owed": 0}
        assert other.available() == 1
        assert other.allocate(second, 1)
        assert sorted(first.blocks + second.blocks) == list(range(8))
        assert not rig.pool.allocate(first, 1)
        rig.pool.release(first)
        assert other.check_integrity() == rig.pool.check_integrity() == ""
        other.release(second)


def test_what_fits_is_found_again_to_the_last_block(make_rig: MakeRig) -> None:
    """Nothing is given up before there is need, however full the pool is."""
    rig = make_rig(capacity_blocks=512)
    prompts = [[number, number, *range(6)] for number in range(128)]
    for prompt in prompts:
        rig.cache(prompt)
    assert rig.pool.unused() == 0
    for prompt in prompts:
        with rig.pool.table("again") as table:
            assert rig.pool.match(table, rig.keys(prompt), prompt) == 4
    assert rig.pool.stats().evictions == {"idle": 0, "waiting": 0}
    assert rig.pool.stats().dedups == 0


def test_dirty_bits_follow_every_change_of_the_index(rig: Rig) -> None:
    control = rig.region.control()
    control.dirty[0] = 0
    (block,) = rig.cache([1, 2])
    assert control.dirty[0] >> block & 1
    control.dirty[0] = 0
    rig.pool.evict(1)
    assert control.dirty[0] == 1 << block
    control.release()


def test_threads_share_a_pool(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=12)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 7))]
                with rig.pool.table(f"r{seed}") as table:
                    matched = rig.pool.match(table, rig.keys(tokens), tokens)
                    if not rig.pool.allocate(table, -(-len(tokens) // 2) - matched):
                        continue
                    for position in range(matched, len(tokens) // 2):
                        ids = tokens[2 * position : 2 * position + 2]
                        rig.pool.seal(table, position, rig.keys(tokens)[position], ids)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert sum(rig.pool.stats().blocks.values()) == 12
        assert rig.pool.check_integrity() == ""
    for thread in threads:
        thread.join()
    assert failures == []
    assert rig.pool.held_blocks() == 0
    assert rig.pool.stats().evicted_while_held == 0
