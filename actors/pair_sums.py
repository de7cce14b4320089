"""Products of float32 rows with pairs of bfloat16, on vectors: what weights and attention without matrix tiles are computed with.

A pair is one 32-bit word, so 16 pairs are one vector: its low halves, moved up, are 16 numbers that belong to one input, its high
halves those of the next. Each is multiplied with one number of a row and added to that row's sums, so nothing is summed across
a vector, and a row is summed the same way whatever others there are.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from actors.lanes import (
    FLOAT,
    INTS,
    TILE,
    VECTOR,
    WIDE,
    constant,
    emit_all,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_store,
)

ROWS: Final = 8 if WIDE else 4
"""At a time, where there are many: as many sums as keep the arithmetic busy and still fit into registers."""
_WORD, _LINE = ir.IntType(64), 64
_HALF, _HIGH = ir.Constant(INTS, [16] * TILE), ir.Constant(INTS, [-65536] * TILE)


def pair_sums(rows: int, vectors: int = 1, *, chains: int = 1, ahead: int = 0) -> Any:
    """Returns an intrinsic for so many rows and `vectors` times 16 outputs.

    out := (out if `go_on` else 0) + x times pairs. It takes addresses and numbers: of x, float32, the bytes from one row to the
    next and from one input to the next; of the pairs, 64 `vectors` bytes for every two inputs, and the bytes from those to the
    next; how many pairs of inputs; of out, float32, and the bytes from one row to the next; and `go_on`.

    `chains` of additions are summed beside each other, 1 or 2, where there are too few rows to keep the arithmetic busy. With
    `ahead` pairs are asked for so many bytes before they are needed.
    """
    places = [(row, part) for row in range(rows) for part in range(vectors)]

    @intrinsic
    def sums(
        typing: Any,
        x: Any,
        row_step: Any,
        input_step: Any,
        pairs: Any,
        pair_step: Any,
        count: Any,
        out: Any,
        out_step: Any,
        go_on: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, row_step, input_step, pairs, pair_step, count, out, out_step, go_on = args

            def vector_at(address: Any, part: int) -> Any:
                return builder.inttoptr(builder.add(address, _WORD(_LINE * part)), VECTOR.as_pointer())

            starts = [builder.add(x, builder.mul(row_step, _WORD(row))) for row in range(rows)]
            targets = [builder.add(out, builder.mul(out_step, _WORD(row))) for row in range(rows)]
            slots = {
                (*place, chain): cgutils.alloca_once(builder, VECTOR) for place in places for chain in range(chains)
            }
            for slot in slots.values():
                builder.store(constant(0.0), slot)
            with builder.if_then(builder.icmp_signed("!=", go_on, _WORD(0))):
                for row, part in places:
                    builder.store(emit_load(builder, vector_at(targets[row], part)), slots[row, part, 0])
            with cgutils.for_range(builder, count, intp=_WORD) as loop:
                at = builder.add(pairs, builder.mul(loop.index, pair_step))
                offset = builder.mul(loop.index, builder.shl(input_step, _WORD(1)))
                if ahead:
                    for part in range(vectors):
                        emit_prefetch(builder, vector_at(builder.add(at, _WORD(ahead)), part))
                for which in range(2):
                    weights = []
                    for part in range(vectors):
                        both = builder.load(builder.bitcast(vector_at(at, part), INTS.as_pointer()))
                        both.align = 4
                        half = builder.and_(both, _HIGH) if which else builder.shl(both, _HALF)
                        weights.append(builder.bitcast(half, VECTOR))
                    for row, start in enumerate(starts):
                        place = builder.add(start, builder.add(offset, input_step) if which else offset)
                        factor = emit_all(builder, builder.load(builder.inttoptr(place, FLOAT.as_pointer())))
                        for part, weight in enumerate(weights):
                            slot = slots[row, part, which % chains]
                            builder.store(emit_fma(builder, factor, weight, builder.load(slot)), slot)
            for row, part in places:
                value = builder.load(slots[row, part, 0])
                for chain in range(1, chains):
                    value = builder.fadd(value, builder.load(slots[row, part, chain]))
                emit_store(builder, value, vector_at(targets[row], part))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return sums
