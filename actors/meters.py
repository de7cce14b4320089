"""Meters of one replica over ray.util.metrics: named, tagged, and able to follow totals that are counted elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram


class Meters:
    """Makes counters, gauges and histograms named `kvatlas_...`, all with the same tags."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        self._tags = dict(tags)
        self._counted: dict[tuple[int, tuple[str, ...]], int] = {}

    def counter(self, name: str, text: str, *extra: str) -> Counter:
        """A total; `extra` are tags that are given with each increment."""
        metric = Counter(f"kvatlas_{name}", text, tag_keys=(*self._tags, *extra))
        metric.set_default_tags(self._tags)
        return metric

    def gauge(self, name: str, text: str, *extra: str) -> Gauge:
        """A level."""
        metric = Gauge(f"kvatlas_{name}", text, tag_keys=(*self._tags, *extra))
        metric.set_default_tags(self._tags)
        return metric

    def histogram(self, name: str, text: str, boundaries: list[float]) -> Histogram:
        """A distribution."""
        metric = Histogram(f"kvatlas_{name}", text, boundaries=boundaries, tag_keys=tuple(self._tags))
        metric.set_default_tags(self._tags)
        return metric

    def raise_to(self, counter: Counter, total: int, **tags: str) -> None:
        """Adds to `counter` what `total` has grown by since the last time it was told with these tags."""
        at = (id(counter), tuple(tags.values()))
        grown = total - self._counted.get(at, 0)
        if grown > 0:
            counter.inc(grown, tags=tags)
            self._counted[at] = total
