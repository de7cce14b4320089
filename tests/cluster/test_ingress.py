"""The ingress's tokenizer comes without torch; its end is the router's; it holds no key and tells the edge what it was told."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.config import Membership
from cluster.api.identity import Identity
from cluster.api.key_list import KeyListError, salt_of
from cluster.config import HttpConfig
from cluster.ingress import Ingress, IngressSettings, _api_settings, _keys
from cluster.routing import RoutingSettings
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint

SCRIPT = """
import sys
from pathlib import Path
from cluster.ingress import _codec
codec = _codec(Path(sys.argv[1]))
assert codec.render_chat([{"role": "user", "content": "hi"}])
print(codec.vocab_size, "torch" in sys.modules)
import torch
"""


@pytest.mark.slow
def test_tokenizes_without_torch_and_leaves_torch_importable(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["262", "False"]


@pytest.mark.parametrize("built", [True, False])
def test_serve_ends_the_router_with_the_ingress(built: bool) -> None:
    class Routing:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    routing = Routing()
    plain: Any = Ingress.__mro__[1]  # without what Ray puts around it
    ingress = object.__new__(plain)
    if built:
        ingress._routing = routing
    ingress.__del__()
    assert routing.closed == built


KEY = "alice-0123456789-key"
SECRET = b"s" * 32
ROUTING = RoutingSettings(Membership("c", SECRET))


def settings_of(**http: Any) -> IngressSettings:
    return IngressSettings.of(HttpConfig(**http), "m", "/models/m", ROUTING)


def test_keys_travel_as_digests() -> None:
    settings = settings_of(api_keys=f"alice:{KEY}", admin_key="open sesame")
    for shown in (repr(settings), str(pickle.dumps(settings))):
        assert KEY not in shown
    assert "sesame" not in repr(settings)
    assert settings.admin_key == "open sesame"
    with pytest.raises(KeyListError):
        settings_of(api_keys="alice")


@pytest.mark.parametrize("salted", [False, True])
def test_the_key_ring_has_the_keys_and_their_salts(tmp_path: Path, salted: bool) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}")
    for given in ({"api_keys": f"alice:{KEY}"}, {"api_keys_file": str(file)}):
        ring = _keys(settings_of(salt_per_key=salted, **given))
        assert ring is not None
        assert ring.identify(KEY) == Identity("alice", salt_of(SECRET, "alice") if salted else "")
        assert ring.identify("another") is None
    assert _keys(settings_of()) is None


def test_the_edge_is_told_every_option() -> None:
    told = _api_settings(
        settings_of(
            max_body_bytes=2048,
            admin_key="open sesame",
            queue_tokens=1,
            key_queue_tokens=2,
            inflight_tokens=3,
            request_timeout_s=4.0,
            keep_alive_s=5.0,
            allow_priority=True,
            cors_origins="https://a.example.com http://b",
        ),
        128,
    )
    assert (told.model_name, told.max_model_len, told.max_body_bytes, told.admin_key) == ("m", 128, 2048, "open sesame")
    limits = told.admission
    assert (limits.queue_tokens, limits.key_queue_tokens, limits.inflight_tokens) == (1, 2, 3)
    assert (told.request_timeout_s, told.keep_alive_s, told.allow_priority) == (4.0, 5.0, True)
    assert told.cors_origins == ("https://a.example.com", "http://b")
    assert told.debug_headers


def test_salts_per_key_keep_silent_about_caches() -> None:
    assert not _api_settings(settings_of(api_keys=f"alice:{KEY}", salt_per_key=True), 128).debug_headers
