"""What the command line asks a running server, over plain HTTP with the standard library: it must start fast."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from cluster.errors import ServeFailed, UsageError

# The server is named explicitly, so a proxy from the environment must not come between.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Answer:
    """Status code and decoded JSON body (`{}` where the body is no JSON object)."""

    status: int
    body: dict[str, Any]

    @property
    def error(self) -> str:
        """The message of an OpenAI error body, or the bare status."""
        error = self.body.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        return str(message or f"HTTP {self.status}")

    @property
    def code(self) -> str:
        """The code of an OpenAI error body; empty where there is none."""
        error = self.body.get("error")
        return str(error.get("code") or "") if isinstance(error, dict) else ""


def get(url: str, timeout_s: float, admin_key: str = "") -> Answer:
    """GET `url`. Raises `UsageError` for a URL that is none, `ServeFailed` when nothing answers."""
    return _ask(url, None, timeout_s, admin_key)


def post(url: str, body: dict[str, Any], timeout_s: float, admin_key: str = "") -> Answer:
    """POST `body` to `url` as JSON. Raises as `get` does."""
    return _ask(url, json.dumps(body).encode(), timeout_s, admin_key)


def _ask(url: str, data: bytes | None, timeout_s: float, admin_key: str) -> Answer:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is no HTTP address: give one such as http://127.0.0.1:8000.")
    if not all(" " <= character <= "~" for character in admin_key):
        raise UsageError(
            "The admin key has characters that no HTTP header takes (line ends, letters beyond ASCII): give the key that "
            "the server was started with."
        )
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        with _opener.open(urllib.request.Request(url, data, headers), timeout=timeout_s) as answer:
            return Answer(answer.status, _object(answer.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _object(error.read()))
    except (
        http.client.InvalidURL,
        ValueError,
        OverflowError,
    ) as error:  # a part of it that is none, a port that is too high
        raise UsageError(f"{url!a} is no HTTP address: give one such as http://127.0.0.1:8000.") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServeFailed(
            f"Nothing answers at {url} ({reason}): check the address, and that the server is running."
        ) from error


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
