"""The block that `kvatlas serve` prints once it serves: where, what, how large, how long it took, and two lines to try."""

from __future__ import annotations

import json
import shlex
from typing import Any

from actors.progress import format_bytes

KEY_VARIABLE = "OPENAI_API_KEY"
# About 300 tokens, so that well over a dozen blocks are shared; the shell repeats the sentence.
_LONG = "The atlas lists every block of the cache and the replica that holds it. "


def ready_block(
    url: str,
    metrics_url: str,
    model: str,
    replicas: list[dict[str, Any]],
    directory: str,
    seconds: float,
    *,
    asks_for_keys: bool = False,
    tells_cached: bool = True,
) -> str:
    """Text for a person. `replicas` are `ReplicaStatus` records; `directory` says where the directory is.

    `tells_cached`: answers say what the cache did for them. Where the server `asks_for_keys`, the lines send the one in
    OPENAI_API_KEY, as the OpenAI clients do: keys are not printed.
    """
    rows = [("API", f"{url}/v1"), ("model", model)]
    for status in replicas:
        blocks, block_tokens = status["capacity_blocks"], status["block_tokens"]
        pool = f"{blocks:,} blocks of {block_tokens} tokens = {blocks * block_tokens:,} tokens"
        rows.append(
            (f"replica {status['replica_id']}", f"{status['mode']} mode, context {status['max_model_len']:,} tokens")
        )
        rows.append(("  pool", pool))
        rows.append(("  loading", ", ".join(_phase(status, name) for name in status["load_s"])))
    rows += [("directory", directory), ("metrics", metrics_url), ("ready after", f"{seconds:.1f} s")]
    lines = ["", "kvatlas is ready", *(f"  {name:<18} {value}" for name, value in rows if value)]
    key = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if asks_for_keys else ""
    asking = f"Ask something, with an API key in {KEY_VARIABLE}:" if asks_for_keys else "Ask something:"
    lines += ["", asking, f"  {chat_curl(url, model, key)}"]
    if tells_cached:
        promise = "the same replica answers, and prompt_tokens_details.cached_tokens says what it reused"
        lines += ["", f"A long prompt; run it twice: {promise}:", f"  {prefix_curl(url, model, key)}"]
    lines += ["", "Stop with Ctrl-C or `kvatlas stop`."]
    return "\n".join(lines)


def _phase(status: dict[str, Any], name: str) -> str:
    """`load 538 MB in 1.6 s`, or without bytes where a phase moves none."""
    size = status["load_bytes"].get(name)
    return f"{name} {f'{format_bytes(size)} in ' if size else ''}{status['load_s'][name]:.1f} s"


def chat_curl(url: str, model: str, key: str = "") -> str:
    """A shell line that asks for the capital of France. `key` is the option that sends an API key."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 32,
    }
    return _curl(f"{url}/v1/chat/completions", shlex.quote(json.dumps(body)), "-s" + key)


def prefix_curl(url: str, model: str, key: str = "") -> str:
    """A shell line with a prompt of some hundred tokens, short to read: printf repeats a sentence.

    Of the answer it shows who gave it, why it was asked, and the body with the usage.
    """
    head = json.dumps({"model": model, "temperature": 0, "max_tokens": 8})[:-1]
    repeated = f"'\"$(printf '{_LONG}%.0s' $(seq 20))\"'"
    line = _curl(f"{url}/v1/completions", f'\'{head}, "prompt": "{repeated}"}}\'', "-si" + key)
    return f"{line} | grep -E 'x-kvatlas|cached_tokens|error'"


def _curl(url: str, quoted_body: str, flags: str) -> str:
    return f"curl {flags} {url} -H 'content-type: application/json' -d {quoted_body}"
