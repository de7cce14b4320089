"""The picture: well-formed, every policy in it, points where they belong."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from router.replay.plot import HEIGHT, drawn

_SVG = "{http://www.w3.org/2000/svg}"


def _run(policy: str, load: float, ttft: float | None, hit: float) -> dict[str, Any]:
    return {"policy": policy, "load": load, "ttft_p95_s": ttft, "hit": hit}


def _lines(svg: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(svg).iter(f"{_SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.get("points", "").split()] for line in lines]  # type: ignore[misc]


def test_two_panels_with_a_line_for_each_policy() -> None:
    runs = [_run(policy, load, t, h) for policy, t, h in (("cost", 1.0, 0.3), ("a<b", 9.0, 0.1)) for load in (0.5, 1.0)]
    svg = drawn(runs)
    lines = _lines(svg)
    assert len(lines) == 4
    (cost, other, hit, less) = lines
    assert [len(line) for line in lines] == [2, 2, 2, 2]
    assert cost[0][0] < cost[1][0]
    assert cost[0][1] > other[0][1]  # a smaller time is further down
    assert hit[0][1] < less[0][1]
    assert all(0 < y < HEIGHT for line in lines for _, y in line)
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{_SVG}text")]
    assert {"cost", "a<b"} <= set(texts)


@pytest.mark.parametrize(
    "runs",
    [
        [_run("cost", 1.0, 0.02, 0.0)],
        [_run("cost", 1.0, None, 0.0), _run("cost", 2.0, 1.0, 1.0)],
        [_run("cost", 1.0, None, 0.0)],
        [_run("cost", 1.0, 10.0, 0.7), _run("cost", 1.2, 1000.0, 0.7)],
    ],
)
def test_odd_runs_can_be_drawn(runs: list[dict[str, Any]]) -> None:
    for line in _lines(drawn(runs)):
        assert all(0 < y < HEIGHT for _, y in line)
