"""The address of a directory as it may be shown."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_password(url: str) -> str:
    """Returns scheme, host, port and path of `url`: what may stand in a message or a log."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "redis://..."
    return f"{parts.scheme}://{host}{port}{parts.path}" if parts.scheme else "the given text"
