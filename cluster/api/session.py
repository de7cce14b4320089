"""The client's word for what belongs together: the header `x-session-id`, unless the body has `prompt_cache_key`.

Only a hint to the router: among replicas that are as good as each other, those of one session go to the same one.
"""

from __future__ import annotations

from starlette.requests import Request


def session_of(request: Request) -> str:
    """The value of the header; "" without one."""
    return request.headers.get("x-session-id", "")
