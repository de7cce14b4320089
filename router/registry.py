"""Where the process that takes requests leaves its `RouteService`, and the router inside Serve finds it.

Serve pickles a request router's module by value, so that module cannot share state with anybody; this one is imported,
and so there is one of it per process. Services are found by the name of the deployment they route to.
"""

from __future__ import annotations

import threading

from router.service import RouteService

_services: dict[str, RouteService] = {}
_lock = threading.Lock()


def install(deployment: str, service: RouteService) -> None:
    """From now on `service` routes to `deployment`, in place of another one."""
    with _lock:
        _services[deployment] = service


def find(deployment: str) -> RouteService | None:
    """Returns the service that routes to `deployment`; None where there is none, as in a process that only sends."""
    return _services.get(deployment)


def remove(deployment: str) -> None:
    """Nobody routes to `deployment` any more. Idempotent."""
    with _lock:
        _services.pop(deployment, None)
