"""A process that stands in for `kvatlas serve` in tests of the benchmark: standard library only, ready at once.

    python bench_server.py PORT NOTES [--policy NAME] [--replicas N] [--fail HOW] [--miscount TOKENS] [--no-routing]
        [--silent TIMES]

A token is a character, a block 16. Each of the N replicas caches every prefix it has answered; requests take turns. NOTES is
a file that gets a line for what happened to the process. HOW is `refuse` (ends as the command does for a bad option),
`crash` (ends with a traceback), `stubborn` (ignores SIGTERM), `leave` (ends at the first completion) or `errors` (answers
every other completion with 503). The first TIMES looks at the state find a router that does not hear of the replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

BLOCK = 16


class State:
    """What the replicas and the router have counted so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.turn = 0
        self.seen: list[set[str]] = [set() for _ in range(options.replicas)]
        self.queried = [0] * options.replicas
        self.hit = [0] * options.replicas
        self.routing = {
            "queried_tokens": 0,
            "predicted_tokens": 0,
            "measured_tokens": 0,
            "phantom_tokens": 0,
            "retries": 0,
        }
        self.asked = 0

    def note(self, text: str) -> None:
        with self.options.notes.open("a", encoding="utf-8") as sink:
            sink.write(f"{text}\n")

    def answer(self, prompt: str) -> tuple[int, int]:
        """(replica, cached tokens) of a new request."""
        with self.lock:
            replica = self.turn % self.options.replicas
            self.turn += 1
            heads = [prompt[:end] for end in range(BLOCK, len(prompt), BLOCK)]
            cached = max((len(head) for head in heads if head in self.seen[replica]), default=0)
            self.seen[replica].update(heads)
            self.queried[replica] += len(prompt)
            self.hit[replica] += cached + self.options.miscount
            self.routing["queried_tokens"] += len(prompt)
            self.routing["predicted_tokens"] += cached
            self.routing["measured_tokens"] += cached
            return replica, cached

    def body(self) -> dict[str, Any]:
        """As GET /debug/state tells it."""
        self.asked += 1
        replicas = [
            {
                "replica_id": f"r{index}",
                "capacity_blocks": 64,
                "block_tokens": BLOCK,
                "blocks": {"free": 64 - len(seen), "held": 0, "cached": len(seen)},
                "prefix_queried_tokens": self.queried[index],
                "prefix_hit_tokens": self.hit[index],
            }
            for index, seen in enumerate(self.seen)
        ]
        routing = {
            "policy": self.options.policy,
            "decisions": {"prefix": self.turn},
            "asked": self.asked,
            **self.routing,
        }
        heard = self.asked > self.options.silent
        pools = [{"state": "live", "replica_ids": [status["replica_id"]]} for status in replicas if heard]
        routing["directory"] = {"state": "live" if heard else "silent", "pools": pools}
        return {"replicas": replicas} | ({} if self.options.no_routing else {"routing": routing})


class Handler(BaseHTTPRequestHandler):
    """The four endpoints that the benchmark uses."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet
    state: State

    def do_GET(self) -> None:
        key = os.environ["KVATLAS_HTTP__ADMIN_KEY"]
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "fake"}]})
        elif self.path == "/debug/state" and self.headers["authorization"] == f"Bearer {key}":
            self._json(200, self.state.body())
        else:
            self._json(404, {})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        how = self.state.options.fail
        if how == "leave":
            os._exit(3)
        replica, cached = self.state.answer(prompt)
        if how == "errors" and self.state.turn % 2:
            self._json(503, {"error": {"message": "full"}})
            return
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        events = [{"choices": [{"text": "a", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        headers = {"x-kvatlas-replica": f"r{replica}", "x-kvatlas-route": f"policy={self.state.options.policy}"}
        self._send(200, "text/event-stream", text.encode(), headers)

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode(), {})

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the output is for what the tests look at."""


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("notes", type=Path)
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--fail", default="")
    parser.add_argument("--miscount", type=int, default=0)
    parser.add_argument("--no-routing", action="store_true")
    parser.add_argument("--silent", type=int, default=0)
    options = parser.parse_args()
    state = State(options)

    def stop(_number: int, _frame: FrameType | None) -> None:
        state.note("SIGTERM")
        if options.fail != "stubborn":
            state.note("stopped")
            os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    state.note(f"pid {os.getpid()} session {os.getsid(0)}")
    state.note(f"policy {options.policy}")
    print("starting", os.environ["KVATLAS_HTTP__ADMIN_KEY"], flush=True)
    if options.fail == "refuse":
        print("kvatlas: pool.tokens cannot be 3: give more.", file=sys.stderr, flush=True)
        sys.exit(2)
    if options.fail == "crash":
        raise RuntimeError("broken")
    Handler.state = state
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
