"""Everything that changes words which several processes share, as machine code over atomic operations.

`entries.py` has what Python calls; `context.py` what they work on. Reading order: atomics, context, free_blocks, index,
holding, chains, sealing, eviction, claims, then entries, reclaim, repair.

The rules that make it work without a lock:

- Who may change what. A block that is LOCAL, MUTABLE, SEALED, EVICTING or FREEING belongs to the slot in its state
  word, and only that process changes it (or, once it is dead, whoever reclaims its slot). A block that is FREE or
  INDEXED belongs to nobody; taking it is one compare-and-swap of the state word.
- Every step of the state is a compare-and-swap, every change of a shared counter or bit set an atomic read-modify-write,
  all sequentially consistent. There is no step whose second half another process waits for.
- A holder sets its bit and then looks at the state; an evictor sets the state and then looks at the holders. One of
  them sees the other.
- All waiting is bounded by a number of looks (`holding.LOOKS`); whoever runs out of them goes on without.
"""
