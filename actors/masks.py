"""What a model's masks really say, learnt from transformers instead of from config names.

transformers describes every mask by a function of (batch, head, query position, key position). While a model is traced, a
`MaskRecorder` stands in for the code that would turn those functions into tensors: each layer gets a marker, and the marker leads
back to the function its mask would have been made from. `window_of` asks the function about positions far apart and gives the
window of a causal mask, or refuses what is neither causal nor a sliding window.

Keyword arguments do not suffice: some families pass a window to attention that their mask does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface

from actors.errors import ModelRefused

MaskFunction = Callable[[Any, Any, Any, Any], Any]

_FAR = 1 << 22
"""Query positions asked about lie beyond this; longer windows count as none."""


class MaskRecorder:
    """Context manager: masks for the attention called `name` become markers. Registered nowhere outside it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._functions: dict[int, MaskFunction] = {}
        self._markers: list[torch.Tensor] = []

    def __call__(self, *, mask_function: MaskFunction, **_: Any) -> torch.Tensor:
        """Stands in for transformers' mask factories; keyword arguments as there."""
        marker = torch.zeros(1, 1, 1, 1)
        self._markers.append(marker)  # kept alive, so that ids stay unique
        self._functions[id(marker)] = mask_function
        return marker

    def function_of(self, mask: Any) -> MaskFunction:
        """The function behind the mask that a layer got. Raises `ModelRefused` if we did not make that mask."""
        if mask is None:
            raise ModelRefused("its attention gets no mask from transformers, so what it may see is unknown")
        if id(mask) not in self._functions:
            raise ModelRefused("its attention gets a mask of its own making")
        return self._functions[id(mask)]

    def __enter__(self) -> MaskRecorder:
        AttentionMaskInterface.register(self._name, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The interface has no way to take a global entry out again; without it our own attention would be given masks.
        AttentionMaskInterface._global_mapping.pop(self._name, None)


def window_of(function: MaskFunction) -> int:
    """Tokens visible to a query under `function`, itself included; 0 if all before it are.

    Raises `ModelRefused` for a mask that is not causal, not contiguous, or whose window depends on the position.
    """
    windows = {_window_at(function, query) for query in (_FAR, _FAR + 1, _FAR + 4099)}
    if len(windows) > 1:
        raise ModelRefused("its attention sees chunks or another pattern that depends on the position")
    return windows.pop()


def _window_at(function: MaskFunction, query: int) -> int:
    def visible(key: int) -> bool:
        batch = head = torch.tensor(0)
        return bool(function(batch, head, torch.tensor(query), torch.tensor(key)))

    if visible(query + 1) or not visible(query):
        raise ModelRefused("its attention is not causal")
    if visible(0):
        low = 0
    else:
        low, high = 0, query
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if visible(middle) else (middle, high)
        low = high
    if not all(visible(low + (query - low) * part // 16) for part in range(16)):
        raise ModelRefused("its attention sees a pattern with holes")
    return query - low + 1 if low else 0
