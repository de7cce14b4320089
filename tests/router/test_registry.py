from __future__ import annotations

from router import registry
from tests.router.scene import Scene


def test_a_service_is_found_by_the_deployment_it_routes_to() -> None:
    one, two = Scene().service, Scene().service
    try:
        registry.install("Engine", one)
        assert registry.find("Engine") is one
        assert registry.find("Other") is None
        registry.install("Engine", two)
        assert registry.find("Engine") is two
    finally:
        registry.remove("Engine")
    registry.remove("Engine")
    assert registry.find("Engine") is None
