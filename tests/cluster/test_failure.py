"""Finding the one sentence in what Serve reports."""

from __future__ import annotations

import pytest

from actors.errors import ModelRefused
from cluster.errors import ServeFailed
from cluster.failure import refusal
from kvpool.errors import KvatlasError, SharedMemoryTooSmall

TRACE = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:kvatlas:engine.initialize_and_get_metadata() (pid=1)
  File "x.py", line 3, in __init__
    raise ModelRefused("why")
{line}
"""


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("actors.errors.ModelRefused: Bloom uses ALiBi: choose another.", ModelRefused),
        ("kvpool.errors.SharedMemoryTooSmall: Bloom uses ALiBi: choose another.", SharedMemoryTooSmall),
        ("ray.exceptions.RayTaskError.errors.ModelRefused: Bloom uses ALiBi: choose another.", ModelRefused),
    ],
)
def test_our_own_refusal_is_final_at_once(line: str, kind: type[KvatlasError]) -> None:
    error = refusal(["", TRACE.format(line=line)], final=False)
    assert type(error) is kind
    assert str(error) == "Bloom uses ALiBi: choose another."


def test_other_errors_wait_until_serve_gives_up() -> None:
    messages = ["", TRACE.format(line="ValueError: odd")]
    assert refusal(messages, final=False) is None
    error = refusal(messages, final=True)
    assert isinstance(error, ServeFailed)
    assert "ValueError: odd" in str(error)
    assert "\n" not in str(error)


def test_nothing_said_is_nothing_found() -> None:
    assert refusal(["", ""], final=False) is None
    assert "no reason given" in str(refusal([""], final=True))
