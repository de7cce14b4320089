"""A router's process is killed under load and started again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.failures.rig import Field

pytestmark = [pytest.mark.redis, pytest.mark.slow]


def test_a_router_that_says_ready_decides_nothing_blindly(field: Field) -> None:
    field.begin(3, routers=2)
    for _ in range(4):
        field.kill_router(field.routers[0])
        router = field.router()
        counted = router.ask("decide")
        assert counted["decisions"] > 0
        assert (counted["blind"], counted["unheard"]) == (0, 0)
    field.finish("router killed and started again")
