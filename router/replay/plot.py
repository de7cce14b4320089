"""A picture of runs, as SVG made by hand: time to first token and hit rate of every policy over the load.

Limits: two panels, a fixed size, no styling beyond what makes it readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final

WIDTH, HEIGHT = 460, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 44
_LEGEND = 150
_COLOURS: Final = ("#1b6ca8", "#d1495b", "#3a7d44", "#edae49", "#66418a", "#00798c", "#8d6b4f", "#5c5c5c")

Run = Mapping[str, Any]


def drawn(runs: Sequence[Run]) -> str:
    """Returns the picture of `runs`, which are as `report.medians` makes them."""
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    colours = {policy: _COLOURS[number % len(_COLOURS)] for number, policy in enumerate(policies)}
    parts = [
        _panel(runs, colours, 0, "P95 time to first token (s)", lambda run: run["ttft_p95_s"], is_log=True),
        _panel(runs, colours, WIDTH, "Share of prompt tokens found cached", lambda run: run["hit"], is_log=False),
    ]
    for number, policy in enumerate(policies):
        y = _TOP + 20 * number
        parts.append(f'<rect x="{2 * WIDTH + 10}" y="{y - 9}" width="12" height="12" fill="{colours[policy]}"/>')
        parts.append(_text(2 * WIDTH + 28, y + 2, policy))
    size = f'width="{2 * WIDTH + _LEGEND}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _panel(
    runs: Sequence[Run], colours: Mapping[str, str], x0: int, title: str, value: Callable[[Run], float | None], is_log: bool
) -> str:  # fmt: skip
    points = [(run["policy"], float(run["load"]), value(run)) for run in runs]
    found = [(policy, load, y) for policy, load, y in points if y is not None and (y > 0 or not is_log)]
    loads = sorted({load for _, load, _ in found}) or [1.0]
    values = [y for _, _, y in found] or [1.0]
    ticks = _powers(min(values), max(values)) if is_log else _steps(max(values))
    low, high = ticks[0], ticks[-1]

    def across(load: float) -> float:
        span = loads[-1] - loads[0]
        share = (load - loads[0]) / span if span else 0.5
        return x0 + _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if is_log else (y - low) / (high - low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    parts = [_text(x0 + _LEFT, _TOP - 18, title), _text(x0 + WIDTH // 2, HEIGHT - 8, "load (1: saturation)")]
    for tick in ticks:
        line = f'x1="{x0 + _LEFT}" x2="{x0 + WIDTH - _RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"'
        parts += [f'<line {line} stroke="#dddddd"/>', _text(x0 + _LEFT - 6, up(tick) + 4, f"{tick:g}", "end")]
    parts += [_text(across(load), HEIGHT - _BOTTOM + 16, f"{load:g}", "middle") for load in loads]
    for policy, colour in colours.items():
        points_of = sorted((load, y) for name, load, y in found if name == policy)
        way = " ".join(f"{across(load):.1f},{up(y):.1f}" for load, y in points_of)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in points_of]
    return "\n".join(parts)


def _powers(least: float, most: float) -> list[float]:
    """Powers of ten around the values."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _steps(most: float) -> list[float]:
    """Five steps from 0 to a round number that is not below the values."""
    if most <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(most))
    top = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= most)
    return [top * step / 5 for step in range(6)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
