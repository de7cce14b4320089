"""How old what a router knows is when nothing fails: pools that evict all the time, and decisions about what they have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.failures.rig import Field

pytestmark = [pytest.mark.redis, pytest.mark.slow]

LATE_S = 0.05
"""No block that left the index longer ago is predicted."""


def _late(field: Field, seconds: float, per_s: float) -> list[float]:
    for number in range(2):
        field.pool(f"pool-{number}", per_s=per_s)
    router = field.router(per_s=4 * per_s)
    field.recovered()
    router.ask("watch")
    field.run(seconds)
    late_s: list[float] = router.ask("late")["late_s"]
    counted = field.counted()
    known = sorted(late for late in late_s if late < math.inf)
    worst = (
        f", at most {known[-1] * 1e3:.1f} ms after they went, half of them {known[len(known) // 2] * 1e3:.1f} ms"
        if known
        else ""
    )
    print(
        f"{counted['decisions']} decisions predicted {counted['predicted']} blocks; {len(late_s)} were gone{worst}; "
        f"{len(late_s) - len(known)} came and went unseen"
    )
    assert counted["predicted"] > 100 * seconds
    field.settle()
    return late_s


def test_what_left_the_index_is_not_predicted_for_long(field: Field) -> None:
    late_s = _late(field, 2.0, 100.0)
    # The bound of a busy machine, where any process may wait for its turn; the soak has the real one.
    assert all(late < 20 * LATE_S for late in late_s), sorted(late_s)[-5:]


@pytest.mark.soak
def test_nothing_is_predicted_that_left_the_index_50_ms_ago(field: Field) -> None:
    late_s = _late(field, 60.0, 100.0)
    assert all(late <= LATE_S for late in late_s), sorted(late_s)[-5:]
