"""What the HTTP edge is told once, at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.api.admission import AdmissionLimits


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of one HTTP edge.

    `max_model_len` is the context of the served model in tokens, prompt and answer together. `admin_key` opens
    the routes below /debug; empty means that they do not exist. `created` is the Unix time shown on the model card.
    `status_timeout_s` bounds how long the health routes wait for the replicas, `check_timeout_s` how long pools, directory and
    mirror may take to be compared. `echo_request_id` is switched off
    behind a proxy that adds x-request-id to every response itself (Ray Serve's does), so that it is there once.

    `admission` bounds what waits. `request_timeout_s` is how long a request may take in all, 0 for ever; `keep_alive_s` after
    how long a silence a stream gets a comment, 0 never. `allow_priority` lets requests say which of them comes first.
    `debug_headers` off leaves out of replies what tells of the caches: headers of ours, and tokens found cached.
    `cors_origins` are the origins of web pages that may use the server.
    """

    model_name: str
    max_model_len: int
    admin_key: str = field(default="", repr=False)
    max_body_bytes: int = 8 * 1024 * 1024
    default_temperature: float = 1.0
    created: int = 0
    status_timeout_s: float = 10.0
    check_timeout_s: float = 30.0
    echo_request_id: bool = True
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    request_timeout_s: float = 0.0
    keep_alive_s: float = 15.0
    allow_priority: bool = False
    debug_headers: bool = True
    cors_origins: tuple[str, ...] = ()
