"""A transformers model that computes over the paged pool.

`load_model` reads the weights and learns the attention geometry from one traced pass (the model tells it, we do not guess
config names). In bfloat16 on the CPU layers are flattened (`flat_layer.py`) and linear layers packed (`packed_linear.py`). After
each, chunked and paged computing on a small private pool must give the model's own eager logits: what fails that is undone, and a
model whose own code fails it is refused. `PagedModel.bind` then points the model at the real pool, and `forward` computes one
step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from actors.attention import AttentionPort, LayerShape, PagedAttention, Trace
from actors.config import Mode
from actors.errors import ModelNotFound, ModelRefused
from actors.flat_layer import LayerCalls, flatten
from actors.masks import MaskRecorder
from actors.packed_linear import Packing, pack
from actors.packed_weight import Fill, fill_for
from actors.step import Piece, StepBatch, build_step
from actors.support import check_class, check_config, check_layers
from kvpool.geometry import BlockGeometry

_log = logging.getLogger(__name__)
_DTYPES: dict[Mode, torch.dtype] = {"exact": torch.float32, "fast": torch.bfloat16}
_PROBE_BLOCK_TOKENS = 8
_PROBE_WINDOW_TOKENS = 512
_TRACED = 8


class PagedModel:
    """A loaded model. Not thread-safe: one thread calls `forward`.

    A `deterministic` one computes the same bits for a token whatever else is in the step and however its prompt was cut: all
    products are of the same number of rows, and one kernel attends for prompts and decodes.
    """

    def __init__(self, model: Any, name: str, *, deterministic: bool = False) -> None:
        self._model = model
        self._port = AttentionPort()
        self._attention: PagedAttention | None = None
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._block_tokens = 0
        self.name = name
        self.vocab_size = int(model.config.vocab_size)
        self.eos_token_ids = _eos_token_ids(model)
        self.context_tokens = int(getattr(model.config, "max_position_embeddings", 0) or 0)
        self.layers = self.kv_heads = self.head_dim = 0
        self._windows: list[int] = []
        self._deterministic = deterministic
        self._rows: Fill = fill_for(alike=deterministic) if model.dtype == torch.bfloat16 else int

    def geometry(self, block_tokens: int) -> BlockGeometry:
        """The blocks this model needs."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        return BlockGeometry(self.layers, self.kv_heads, self.head_dim, block_tokens, dtype)

    def bind(self, pool: torch.Tensor) -> None:
        """Compute over `pool` [blocks, layers, 2, kv_heads, block_tokens, head_dim] from now on."""
        self._attention = PagedAttention(pool, self._windows)
        self._block_tokens = int(pool.shape[4])
        self._port.handler = self._attention
        self._port.flat = self._attention.flat

    def forward(self, pieces: list[Piece]) -> tuple[torch.Tensor, list[int]]:
        """Compute one step. Returns float32 logits [rows, vocab] and the index in `pieces` of each row.

        Writes K and V of every token of every piece into the bound pool.
        """
        assert self._attention is not None, "bind a pool first"
        step = build_step(pieces, self._block_tokens, self._rows, one_by_one=self._deterministic)
        self._attention.step = step
        try:
            return self._logits(step), step.order
        finally:
            self._attention.step = None

    def unbind(self) -> None:
        """Let go of the pool. Computing again needs another `bind`."""
        self._attention = None
        self._port.handler = self._port.flat = None

    @torch.inference_mode()
    def _logits(self, step: StepBatch) -> torch.Tensor:
        options: dict[str, Any] = {"logits_to_keep": step.logits_index} if self._keeps_logits else {}
        out = self._model(input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, **options)
        logits = out.logits[0]
        if not self._keeps_logits:
            logits = logits[step.logits_index]
        return logits.float()  # type: ignore[no-any-return]

    def learn(self) -> None:
        """Trace the attention, then compare the paged path with eager. Raises `ModelRefused`."""
        config = self._model.config
        ids = self._probe_ids()
        with torch.inference_mode():
            expected = self._model(input_ids=ids, use_cache=False).logits[0].float()
        self._model.set_attn_implementation(self._port.name)
        if config._attn_implementation != self._port.name:
            raise ModelRefused(f"{type(self._model).__name__} keeps its own attention")
        with MaskRecorder(self._port.name) as masks, LayerCalls(self._model) as calls, torch.inference_mode():
            trace = Trace(masks)
            self._port.handler = trace
            self._model(input_ids=ids[:, :_TRACED], position_ids=torch.arange(_TRACED).unsqueeze(0), use_cache=False)
        shape = check_layers(config, trace.layers, trace.calls)
        self.layers, self.kv_heads, self.head_dim = len(trace.layers), shape.kv_heads, shape.key_dim
        self._windows = [trace.layers[index].window for index in range(self.layers)]
        # What its own code computes over the pool is only of interest where that code serves.
        if not self._kept(self._flatten(calls, trace.layers), "layers of its own code", ids, expected):
            self._compare(ids, expected)
        self._kept(pack(self._model, alike=self._deterministic), "plain linear layers", ids, expected)

    def _flatten(self, calls: LayerCalls, shapes: Mapping[int, LayerShape]) -> Packing:
        """Replace whole layers (`flat_layer.py`), each checked by itself, called as in the traced pass."""
        self.bind(torch.zeros(1, *self.geometry(_PROBE_BLOCK_TOKENS).shape, dtype=self._model.dtype))
        assert self._attention is not None
        traced = [Piece(range(_TRACED), 0, [0], True)]
        self._attention.step = build_step(traced, _PROBE_BLOCK_TOKENS, one_by_one=self._deterministic)
        packing = flatten(calls, shapes, self._port, alike=self._deterministic)
        self.unbind()
        return packing

    def _kept(self, packing: Packing, else_: str, ids: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether anything was replaced and the model still computes what it did; else `packing` is undone. Raises nothing."""
        if not packing.layers:
            return False
        try:
            self._compare(ids, expected)
        except Exception as error:  # a model's own code may do anything with the layers it has
            _log.warning("%s is served with %s: %s", self.name, else_, _first_line(error))
            self.unbind()
            packing.undo()
            return False
        return True

    def prove_deterministic(self) -> None:
        """Compute the same tokens alone, among others, and cut differently. Raises `ModelRefused` where a bit differs."""
        tokens = self._probe_ids()[0].tolist()
        total = len(tokens)
        blocks = -(-total // _PROBE_BLOCK_TOKENS)
        self.bind(torch.zeros(3 * blocks, *self.geometry(_PROBE_BLOCK_TOKENS).shape, dtype=self._model.dtype))
        mine, *others = (list(range(start, start + blocks)) for start in range(0, 3 * blocks, blocks))
        found: list[torch.Tensor] = []
        for cuts, company in (((0, total), 0), ((0, 1, total // 2, total - 1, total), 0), ((0, total - 1, total), 2)):
            for start, end in pairwise(cuts):
                pieces = [Piece(tokens[start:end][::-1], start, other, True) for other in others[:company]]
                logits, order = self.forward([*pieces, Piece(tokens[start:end], start, mine, True)])
            found.append(logits[order.index(company)])
        self.unbind()
        if not all(torch.equal(one, found[0]) for one in found):
            raise ModelRefused("its results depend on what is computed beside them, so it cannot be deterministic here")

    def _probe_ids(self) -> torch.Tensor:
        """Token ids [1, n] long enough to cross blocks, a chunk border and, where it is short, the sliding window."""
        window = int(getattr(self._model.config, "sliding_window", None) or 0)
        tokens = 4 * _PROBE_BLOCK_TOKENS + 5 + (window if window <= _PROBE_WINDOW_TOKENS else 0)
        if self.context_tokens:
            tokens = min(tokens, self.context_tokens)
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, self.vocab_size, (1, tokens), generator=generator)

    def _compare(self, ids: torch.Tensor, expected: torch.Tensor) -> None:
        tokens = ids[0].tolist()
        total = len(tokens)
        geometry = self.geometry(_PROBE_BLOCK_TOKENS)
        blocks = list(range((total + _PROBE_BLOCK_TOKENS - 1) // _PROBE_BLOCK_TOKENS))[::-1]
        self.bind(torch.zeros(len(blocks), *geometry.shape, dtype=self._model.dtype))
        cuts = sorted({0, total // 3, total - 3, total - 2, total - 1, total})
        errors: list[float] = []
        for start, end in pairwise(cuts):
            logits, _ = self.forward([Piece(tokens[start:end], start, blocks, True)])
            wanted = expected[end - 1]
            errors.append(float((logits[0] - wanted).norm() / (wanted - wanted.mean()).norm().clamp_min(1e-9)))
        self.unbind()
        exact = self._model.dtype == torch.float32
        # In bfloat16 a rounding can tip a mixture-of-experts choice in one row; a wrong kernel is wrong in most.
        error = max(errors) if exact else sorted(errors)[len(errors) // 2]
        if not error <= (2e-3 if exact else 0.15):
            raise ModelRefused(
                f"over the paged pool its logits differ from its own eager attention (relative error {error:.2g}); "
                "its attention does something the kernels do not"
            )


def load_model(path: Path, name: str, mode: Mode, *, deterministic: bool = False) -> PagedModel:
    """Load the model directory `path` for serving. `deterministic` is for mode `fast`.

    Raises `ModelNotFound` (unreadable directory) and `ModelRefused` (cannot be served right; the message says why).
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} holds no model that transformers can read: {_first_line(error)}") from error
    try:
        check_config(config)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=_DTYPES[mode], attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{name} cannot be served: transformers does not load it ({_first_line(error)})") from error
    except ModelRefused as error:
        raise ModelRefused(f"{name} cannot be served: {error}") from error
    return adopt(model, name, deterministic=deterministic)


def adopt(model: Any, name: str, *, deterministic: bool = False) -> PagedModel:
    """Make a loaded transformers model servable. Mutates its attention implementation. Raises `ModelRefused`."""
    try:
        check_config(model.config)
        check_class(model, inspect.signature(model.forward).parameters)
        paged = PagedModel(model.eval(), name, deterministic=deterministic)
        paged.learn()
        if deterministic:
            paged.prove_deterministic()
    except ModelRefused as error:
        raise ModelRefused(f"{name} cannot be served: {error}") from error
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        # Whatever a family's own code trips over with our attention behind it is a family we do not serve.
        raise ModelRefused(f"{name} cannot be served: a trial pass failed ({_first_line(error)})") from error
    return paged


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
