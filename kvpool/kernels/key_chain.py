"""The chain of block keys in machine code: BLAKE2b (RFC 7693) over packed token ids, one call for a whole prompt.

`hashlib` computes the same bytes (`kvpool/keys.py`), but a Python object and two calls for each block cost five times what
hashing the block does. Here the state after the secret's own block is computed once for each cluster (`keyed_state`); each
block of tokens then takes one compression for every 128 bytes of parent key and ids.

A round mixes the columns, then the diagonals, of a 4 x 4 matrix of 64-bit words. All of it is on local values, with the
schedule of message words as constants, so that the compiler keeps the matrix in registers.

Limits: little-endian machines. Addresses are trusted: `kvpool/keys.py` checks lengths.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from numba import int64, uint64

from kvpool.compiled import entry, inner
from kvpool.kernels.atomics import get, get_half, put
from kvpool.keys import KEY_BYTES
from kvpool.packed import address_of

BLOCK_BYTES: Final = 128
STATE_WORDS: Final = 8
_LAST: Final = 0xFFFFFFFFFFFFFFFF

_START: Final = (
    0x6A09E667F3BCC908,
    0xBB67AE8584CAA73B,
    0x3C6EF372FE94F82B,
    0xA54FF53A5F1D36F1,
    0x510E527FADE682D1,
    0x9B05688C2B3E6C1F,
    0x1F83D9ABFB41BD6B,
    0x5BE0CD19137E2179,
)
_SCHEDULE: Final = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
    (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
    (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
    (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
    (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
    (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
    (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
    (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
    (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
)

Word = np.uint64
Matrix = tuple[Word, ...]


@inner
def _turn(word: Word, bits: int) -> Word:
    turned: Word = word >> uint64(bits) | word << uint64(64 - bits)
    return turned


@inner
def _mix(a: Word, b: Word, c: Word, d: Word, x: Word, y: Word) -> Matrix:
    a = a + b + x
    d = _turn(d ^ a, 32)
    c = c + d
    b = _turn(b ^ c, 24)
    a = a + b + y
    d = _turn(d ^ a, 16)
    c = c + d
    b = _turn(b ^ c, 63)
    return a, b, c, d


@inner
def _round(v: Matrix, m: Matrix, s: tuple[int, ...]) -> Matrix:
    a0, b0, c0, d0 = _mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]])
    a1, b1, c1, d1 = _mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]])
    a2, b2, c2, d2 = _mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]])
    a3, b3, c3, d3 = _mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]])
    a0, b1, c2, d3 = _mix(a0, b1, c2, d3, m[s[8]], m[s[9]])
    a1, b2, c3, d0 = _mix(a1, b2, c3, d0, m[s[10]], m[s[11]])
    a2, b3, c0, d1 = _mix(a2, b3, c0, d1, m[s[12]], m[s[13]])
    a3, b0, c1, d2 = _mix(a3, b0, c1, d2, m[s[14]], m[s[15]])
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@inner
def _compressed(h: Matrix, m: Matrix, hashed_bytes: int, last: int) -> Matrix:
    """The state `h` after the message block `m`, which ends after `hashed_bytes`; `last` is all ones for the last block."""
    v = (
        *h,
        uint64(_START[0]),
        uint64(_START[1]),
        uint64(_START[2]),
        uint64(_START[3]),
        uint64(_START[4]) ^ uint64(hashed_bytes),
        uint64(_START[5]),
        uint64(_START[6]) ^ uint64(last),
        uint64(_START[7]),
    )
    v = _round(v, m, _SCHEDULE[0])
    v = _round(v, m, _SCHEDULE[1])
    v = _round(v, m, _SCHEDULE[2])
    v = _round(v, m, _SCHEDULE[3])
    v = _round(v, m, _SCHEDULE[4])
    v = _round(v, m, _SCHEDULE[5])
    v = _round(v, m, _SCHEDULE[6])
    v = _round(v, m, _SCHEDULE[7])
    v = _round(v, m, _SCHEDULE[8])
    v = _round(v, m, _SCHEDULE[9])
    v = _round(v, m, _SCHEDULE[0])
    v = _round(v, m, _SCHEDULE[1])
    return (
        h[0] ^ v[0] ^ v[8],
        h[1] ^ v[1] ^ v[9],
        h[2] ^ v[2] ^ v[10],
        h[3] ^ v[3] ^ v[11],
        h[4] ^ v[4] ^ v[12],
        h[5] ^ v[5] ^ v[13],
        h[6] ^ v[6] ^ v[14],
        h[7] ^ v[7] ^ v[15],
    )


@inner
def _state(address: int) -> Matrix:
    return (
        uint64(get(address)),
        uint64(get(address + 8)),
        uint64(get(address + 16)),
        uint64(get(address + 24)),
        uint64(get(address + 32)),
        uint64(get(address + 40)),
        uint64(get(address + 48)),
        uint64(get(address + 56)),
    )


@inner
def _word(first: Word, second: Word, ids: int, tokens: int, number: int) -> Word:
    """Word `number` of the message: the parent's two, then two ids each, then zeros."""
    if number == 0:
        return first
    if number == 1:
        return second
    token = 2 * (number - 2)
    word: Word = uint64(0)
    if token < tokens:
        word = uint64(get_half(ids + 4 * token))
    if token + 1 < tokens:
        word = word | uint64(get_half(ids + 4 * token + 4)) << uint64(32)
    return word


@inner
def _message(first: Word, second: Word, ids: int, tokens: int, at: int) -> Matrix:
    """Sixteen words of the message from word `at` on."""
    return (
        _word(first, second, ids, tokens, at),
        _word(first, second, ids, tokens, at + 1),
        _word(first, second, ids, tokens, at + 2),
        _word(first, second, ids, tokens, at + 3),
        _word(first, second, ids, tokens, at + 4),
        _word(first, second, ids, tokens, at + 5),
        _word(first, second, ids, tokens, at + 6),
        _word(first, second, ids, tokens, at + 7),
        _word(first, second, ids, tokens, at + 8),
        _word(first, second, ids, tokens, at + 9),
        _word(first, second, ids, tokens, at + 10),
        _word(first, second, ids, tokens, at + 11),
        _word(first, second, ids, tokens, at + 12),
        _word(first, second, ids, tokens, at + 13),
        _word(first, second, ids, tokens, at + 14),
        _word(first, second, ids, tokens, at + 15),
    )


@entry
def absorb(state: int, block: int) -> int:
    """The 8 words at `state` := what they are after the first 128 bytes of a longer message, those at `block`."""
    words = (*_state(block), *_state(block + 64))
    after = _compressed(_state(state), words, BLOCK_BYTES, 0)
    for number in range(STATE_WORDS):
        put(state + 8 * number, int64(after[number]))
    return 0


@entry
def chain(state: int, parent: int, ids: int, tokens: int, blocks: int, keys: int) -> int:
    """Writes the keys of `blocks` blocks of `tokens` ids each (u32, at `ids`) to `keys`, 16 bytes each.

    `state`: 8 words, the hash after the secret. `parent`: two words, the key before the first block.
    """
    begun = _state(state)
    first, second = uint64(get(parent)), uint64(get(parent + 8))
    size = KEY_BYTES + 4 * tokens
    for block in range(blocks):
        h = begun
        done = 0
        while size - done > BLOCK_BYTES:
            words = _message(first, second, ids, tokens, done // 8)
            done += BLOCK_BYTES
            h = _compressed(h, words, BLOCK_BYTES + done, 0)
        h = _compressed(h, _message(first, second, ids, tokens, done // 8), BLOCK_BYTES + size, _LAST)
        first, second = h[0], h[1]
        put(keys + 16 * block, int64(first))
        put(keys + 16 * block + 8, int64(second))
        ids += 4 * tokens
    return 0


def keyed_state(secret: bytes, person: bytes) -> npt.NDArray[np.uint64]:
    """Returns the state of `hashlib.blake2b(key=secret, digest_size=16, person=person)` after the secret: 8 words.

    `secret` has 1 to 64 bytes, `person` up to 16.
    """
    head = bytes((KEY_BYTES, len(secret), 1, 1)) + bytes(44) + person.ljust(16, b"\0")
    state = np.frombuffer(head, np.uint64) ^ np.array(_START, np.uint64)
    block = secret.ljust(BLOCK_BYTES, b"\0")
    absorb(state.ctypes.data, address_of(block))
    return state


def chained(state: npt.NDArray[np.uint64], parent: bytes, ids: bytes, block_tokens: int) -> bytes:
    """Returns the keys of the full blocks of `ids` (little-endian u32), packed. `state` is of `keyed_state`."""
    blocks = len(ids) // (4 * block_tokens)
    keys = np.empty(2 * blocks, np.uint64)
    chain(state.ctypes.data, address_of(parent), address_of(ids), block_tokens, blocks, keys.ctypes.data)
    return keys.tobytes()
