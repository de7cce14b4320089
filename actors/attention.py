"""Attention of an unmodified transformers model over the paged pool.

transformers looks an attention function up by name for every layer. We register one `AttentionPort` per model under a
name of its own and put a handler behind it: first a `Trace`, which learns the geometry from what the model really
passes, then `PagedAttention`, which writes K and V into the pool and attends through the block table. The step travels
on the handler, not through the model's keyword arguments: not every family forwards those.

Except while a model is traced no mask function is registered under our names, so transformers builds no mask (checked: a
mask that arrives is refused). What a layer may see was learnt from its mask function, see `actors.masks`. Source:
transformers' AttentionInterface documentation.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from actors.chunk_attention import attend_chunk, fits
from actors.errors import ModelRefused
from actors.fused_kernels import attend_rows, prompt_rows, write_rows
from actors.kernels import bits_of, decode_attention, parts_of, write_kv
from actors.masks import MaskRecorder, window_of
from actors.packed_weight import onednn_packs
from actors.step import PromptChunk, StepBatch
from actors.team import run, threads_for

_KNOWN = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
    }
    | {"scaling", "sliding_window", "softcap", "use_cache"}
)
_QUERIES = 32
_KEYS = 64
"""Chunks are filled up to multiples of these: torch compiles code for every size of bfloat16 attention, and keeps it for good."""
_port_numbers = itertools.count()

Handler = Callable[..., tuple[torch.Tensor, None]]
FlatHandler = Callable[[int, "LayerShape", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """How one call scores. `softcap` 0.0 means "none"."""

    scaling: float
    softcap: float

    @classmethod
    def read(cls, module: Any, head_dim: int, options: dict[str, Any]) -> Options:
        """Read the keyword arguments of a call. Raises `ModelRefused` for anything the kernels do not implement.

        A sliding window among them is ignored: what counts is the layer's mask.
        """
        causal = options.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if not causal:
            raise ModelRefused("its attention is not causal")
        unknown = sorted(name for name, value in options.items() if name not in _KNOWN and _is_set(value))
        if unknown:
            raise ModelRefused(f"its attention uses {', '.join(unknown)}, which the kernels do not implement")
        scaling = options.get("scaling")
        return cls(float(head_dim**-0.5 if scaling is None else scaling), float(options.get("softcap") or 0.0))


def _is_set(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (value is not None and value is not False)


class AttentionPort:
    """The name under which one model finds its attention. Set `handler` to None to let go of what it holds."""

    def __init__(self) -> None:
        self.name = f"kvatlas_{next(_port_numbers)}"
        self.handler: Handler | None = None
        self.flat: FlatHandler | None = None
        """What layers without modules of their own call (`flat_layer.py`)."""
        AttentionInterface.register(self.name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        assert self.handler is not None, "attention called outside a step"
        return self.handler(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer showed while traced. `window`: tokens a query sees, itself included; 0 for all. `asked`: how it scores."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    asked: Options


class Trace:
    """Handler that records what each layer passes and answers with plain causal attention."""

    def __init__(self, masks: MaskRecorder) -> None:
        self._masks = masks
        self.layers: dict[int, LayerShape] = {}
        self.calls = 0

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        asked = Options.read(module, query.shape[-1], options)
        self.calls += 1
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise ModelRefused("its attention layers carry no layer_idx")
        window = window_of(self._masks.function_of(attention_mask))
        self.layers[index] = LayerShape(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], window, asked)
        if query.shape[1] % key.shape[1] or query.shape[-1] != key.shape[-1]:
            raise ModelRefused("its query and key heads have different shapes")
        group = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            is_causal=True,
            scale=asked.scaling,
        )
        return out.transpose(1, 2).contiguous(), None


class PagedAttention:
    """Handler over the pool tensor `pool` [blocks, layers, 2, kv_heads, block_tokens, head_dim].

    `windows[layer]` tokens are visible to a query in that layer (0: all). Set `step` before each forward pass. Mutates the
    pool at the step's slots.
    """

    def __init__(self, pool: torch.Tensor, windows: Sequence[int]) -> None:
        self._windows = tuple(windows)
        self._pool = pool
        self._array = _as_array(pool)
        self._block_tokens = int(pool.shape[4])
        self._told: dict[int, array[int]] = {}
        self.step: StepBatch | None = None

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        step = self.step
        assert step is not None, "attention called outside a step"
        if attention_mask is not None:
            raise ModelRefused("its attention gets a mask of its own making")
        asked = Options.read(module, query.shape[-1], options)
        layer = int(module.layer_idx)
        window = self._windows[layer]
        keys, values = _as_array(key[0].detach()), _as_array(value[0].detach())
        write_kv(self._array, layer, step.slot_blocks, step.slot_offsets, keys, values)
        singles = step.singles
        parts: list[torch.Tensor] = []
        filled = query.shape[2] - len(step.slot_blocks)
        if singles:
            queries = query[0, :, :singles].transpose(0, 1).to(torch.float32).contiguous()
            attended = torch.empty_like(queries)
            decode_attention(
                queries.numpy(),
                self._array,
                layer,
                step.tables,
                step.lengths,
                asked.scaling,
                window,
                asked.softcap,
                attended.numpy(),
                torch.get_num_threads(),
            )
            parts.append(attended.to(query.dtype))
        for chunk in step.chunks:
            span = slice(chunk.first, chunk.first + chunk.count)
            own, asking = (_filled(part[0, :, span], _QUERIES) for part in (key, query))
            seen = self._gather(chunk, layer, window) if chunk.start else (own, _filled(value[0, :, span], _QUERIES), 0)
            parts.append(self._attended(step, chunk, asking, *seen, window, asked))
        if filled:
            parts.append(query.new_zeros(filled, query.shape[1], query.shape[3]))
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).unsqueeze(0), None

    def flat(
        self, layer: int, shape: LayerShape, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Attention [rows, heads * head_dim] from bfloat16 `qkv` [rows, (heads + 2 kv_heads) * head_dim], not rotated yet.

        `cos`, `sin`: contiguous bfloat16 [1, rows, head_dim].
        """
        step = self.step
        assert step is not None, "attention called outside a step"
        heads, dim = shape.heads, shape.key_dim
        rows = qkv.shape[0]
        out = qkv.new_empty(rows, heads * dim)
        rows_at = (qkv.data_ptr(), cos.data_ptr(), sin.data_ptr())
        told = (self._told_of(layer, shape).buffer_info()[0], step.told.buffer_info()[0])
        in_place = fits(self._block_tokens, dim, shape.value_dim, shape.asked.scaling)
        threads = torch.get_num_threads()
        written = len(step.slot_blocks) if in_place else step.singles
        if written:
            run(write_rows, threads_for(written), *rows_at, written, *told)
        if step.singles:
            parts = parts_of(step.singles, shape.kv_heads, threads)
            run(attend_rows, threads, *rows_at, step.singles, *told, out.data_ptr(), parts)
        for chunk in step.chunks:
            if in_place:
                place, seen = (chunk.first, chunk.count, chunk.start), (shape.kv_heads, dim, shape.window)
                attend_chunk(rows_at, told[0], chunk.blocks, place, seen, out)
                continue
            room = _whole(chunk.count, _QUERIES)
            queries = qkv.new_zeros(heads, room, dim)
            both = qkv.new_zeros(0 if chunk.start else 2, shape.kv_heads, room, dim)
            kept = 0 if chunk.start else both.data_ptr()
            laid = (chunk.count, room, queries.data_ptr(), kept)
            run(prompt_rows, threads_for(chunk.count), *rows_at, chunk.first, *told, *laid)
            known = self._gather(chunk, layer, shape.window) if chunk.start else (both[0], both[1], 0)
            attended = self._attended(step, chunk, queries, *known, shape.window, shape.asked)
            out[chunk.first : chunk.first + chunk.count].view(chunk.count, heads, dim).copy_(attended)
        if rows > len(step.slot_blocks):
            out[len(step.slot_blocks) :].zero_()
        return out

    def _told_of(self, layer: int, shape: LayerShape) -> array[int]:
        """What kernels are told of the pool, and of how `layer` scores: see `fused_kernels.py`."""
        found = self._told.get(layer)
        if found is None:
            blocks, layers, _, kv_heads, block_tokens, dim = self._array.shape
            pool = (shape.heads // shape.kv_heads, self._pool.data_ptr(), blocks, layers, kv_heads, block_tokens, dim)
            scores = (bits_of(shape.asked.scaling), shape.window, bits_of(shape.asked.softcap))
            found = self._told[layer] = array("q", (*pool, layer, *scores))
        return found

    def _gather(self, chunk: PromptChunk, layer: int, window: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """K and V [kv_heads, tokens, head_dim] of everything the chunk may see, and the position of the first of them.

        Filled up with zeros.
        """
        end = chunk.start + chunk.count
        first_block = max(0, chunk.start - window + 1) // self._block_tokens if window else 0
        last_block = (end + self._block_tokens - 1) // self._block_tokens
        first = first_block * self._block_tokens
        # Layer first: indexing both at once copies element by element.
        both = self._pool[:, layer].index_select(0, chunk.blocks[first_block:last_block])
        _, _, kv_heads, block_tokens, dim = both.shape
        held = len(both) * block_tokens
        out = both.new_empty(2, kv_heads, max(held, _whole(end - first, _KEYS)), dim)
        out[:, :, :held].view(2, kv_heads, len(both), block_tokens, dim).copy_(both.permute(1, 2, 0, 3, 4))
        out = out[:, :, : _whole(end - first, _KEYS)]
        out[:, :, end - first :] = 0
        return out[0], out[1], first

    def _attended(
        self,
        step: StepBatch,
        chunk: PromptChunk,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int,
        window: int,
        asked: Options,
    ) -> torch.Tensor:
        """[count, heads, head_dim] of a chunk. `queries`, `keys`, `values` by heads, filled up with zeros."""
        mask = self._mask(step, chunk, first, queries.shape[1], keys.shape[1], window, _computed_in(queries.dtype))
        return _attend(queries, keys, values, mask, asked)[:, : chunk.count].transpose(0, 1)

    @staticmethod
    def _mask(
        step: StepBatch, chunk: PromptChunk, first: int, rows: int, tokens: int, window: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What to add to the scores [queries, keys]: 0 where visible, else -inf; None where plain causal masking says the same.

        Not boolean: torch would turn that into this, again in every layer.
        """
        if chunk.start == 0 and (not window or chunk.count <= window):
            return None
        memo = (chunk.first, first, window)
        if memo not in step.masks:
            # Rows that are nobody's see what the last one sees: a row that sees nothing is no number.
            queries = (
                torch.arange(chunk.start, chunk.start + rows).clamp_max(chunk.start + chunk.count - 1).unsqueeze(1)
            )
            keys = torch.arange(first, first + tokens).unsqueeze(0)
            visible = keys <= queries
            if window:
                visible &= keys > queries - window
            step.masks[memo] = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return step.masks[memo]


def _whole(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit


def _filled(part: torch.Tensor, unit: int) -> torch.Tensor:
    """[heads, n, d] with zeros up to a multiple of `unit` tokens."""
    missing = _whole(part.shape[1], unit) - part.shape[1]
    return F.pad(part, (0, 0, 0, missing)) if missing else part


def plain_attention(
    shape: LayerShape, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """A handler for a whole short prompt [1, heads, n, d] without a pool, in any type. Windows are taken to be longer."""
    return _attend(query[0], key[0], value[0], None, shape.asked).transpose(0, 1).unsqueeze(0), None


def _as_array(tensor: torch.Tensor) -> Any:
    """The numpy view of a CPU tensor; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """float32 for bfloat16 that the CPU has no instructions for: torch's emulation of them takes ten times as long."""
    return torch.float32 if dtype == torch.bfloat16 and not onednn_packs() else dtype


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, asked: Options
) -> torch.Tensor:
    """Reference attention: query [heads, n, d], key and value [kv_heads, m, d] -> [heads, n, d]."""
    group, given = query.shape[0] // key.shape[0], query.dtype
    query, key, value = (part.to(_computed_in(given)) for part in (query, key, value))
    if not asked.softcap:
        return F.scaled_dot_product_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=asked.scaling,
            enable_gqa=group > 1,
        )[0].to(given)
    scores = torch.matmul(query, key.repeat_interleave(group, 0).transpose(1, 2)) * asked.scaling
    scores = torch.tanh(scores / asked.softcap) * asked.softcap
    if mask is None:
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu(1)
    weights = (scores + mask).softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value.repeat_interleave(group, 0)).to(given)
