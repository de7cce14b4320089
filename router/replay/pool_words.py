"""A simulated pool as the product's publisher sees a region: state and parent words, keys, dirty bits.

`Publisher` and `Shadow` (`kvpool/directory/`) read four things of a region's control part. Here they are windows on a row of
the simulated fleet's arrays, whose words have the region's form, so the publisher of the product runs over them unchanged:
what is published is prefix-closed, numbered and carries digests because that code makes it so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from router.replay.state import Pools


class PoolWords:
    """The pool of replica `number`. `keys` [nodes, 16] are the trace's."""

    def __init__(self, pools: Pools, number: int, keys: npt.NDArray[np.uint8]) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {"state": pools.state[number], "dirty": pools.dirty[number]}
        self._node_of = memoryview(pools.node_of[number])
        self._keys = keys
        self.state = memoryview(pools.state[number])
        self.parent = memoryview(pools.parent[number])

    def array(self, name: str) -> npt.NDArray[Any]:
        """Returns the words of `state` or `dirty`."""
        return self._arrays[name]

    def key(self, block: int) -> bytes:
        """Returns the key last written for `block`."""
        key: bytes = self._keys[self._node_of[block]].tobytes()
        return key
