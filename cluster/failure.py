"""The one sentence in a pile of tracebacks: what a replica refused, read from what Serve reports about its start."""

from __future__ import annotations

import re
from collections.abc import Iterable

from actors import errors as actor_errors
from cluster.errors import ServeFailed
from kvpool import errors as pool_errors
from kvpool.errors import KvatlasError

# The last line of a Python traceback: module.Class: message.
_RAISED = re.compile(r"^(?:\w+\.)*errors\.(\w+): (.+)$", re.MULTILINE)
_LAST = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)): (.+)$", re.MULTILINE)


def refusal(messages: Iterable[str], final: bool) -> KvatlasError | None:
    """The error that `messages` of the application and its deployments tell of, or None while there is none.

    One of our own exceptions is final at once: starting again would end the same. Anything else counts when Serve gave
    up (`final`).
    """
    texts = list(messages)
    for text in texts:
        for name, sentence in _RAISED.findall(text):
            kind = getattr(actor_errors, name, None) or getattr(pool_errors, name, None)
            if isinstance(kind, type) and issubclass(kind, KvatlasError):
                error: KvatlasError = kind(sentence)
                return error
    if not final:
        return None
    for text in texts:
        found = _LAST.findall(text)
        if found:
            name, sentence = found[-1]
            return ServeFailed(f"The replica did not start ({name}: {sentence}): see Ray's logs for its traceback.")
    return ServeFailed(f"The replica did not start ({texts[0].strip() or 'no reason given'}): see Ray's logs.")
