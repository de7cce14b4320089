"""What the HTTP edge is told once, at start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of one HTTP edge.

    `max_model_len` is the context of the served model in tokens, prompt and answer together. `admin_key` opens
    the routes below /debug; empty means that they do not exist. `created` is the Unix time shown on the model card.
    `status_timeout_s` bounds how long the health routes wait for the replicas, `check_timeout_s` how long pools, directory and
    mirror may take to be compared. `echo_request_id` is switched off
    behind a proxy that adds x-request-id to every response itself (Ray Serve's does), so that it is there once.
    """

    model_name: str
    max_model_len: int
    admin_key: str = field(default="", repr=False)
    max_body_bytes: int = 8 * 1024 * 1024
    default_temperature: float = 1.0
    created: int = 0
    status_timeout_s: float = 5.0
    check_timeout_s: float = 30.0
    echo_request_id: bool = True
