"""`kvatlas explain`: where would this prompt go now, and why? It asks POST /debug/route; nothing is generated or booked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cluster import http_client
from cluster.cli.output import print_json, print_table, say
from cluster.cli.target import KEY_VARIABLE, Target, find
from cluster.errors import ServeFailed, UsageError

ANSWER_S = 30.0
POOL_CHARACTERS: Final = 8
"""Of a pool's name, in the table: enough to tell pools apart."""
SEEN: Final = {
    "replica_id": ("REPLICA", ""),
    "pool": ("POOL", ""),
    "matched_tokens": ("LISTED", "tokens"),
    "promised_tokens": ("COMING", "tokens"),
    "cached_tokens": ("HIT", "tokens"),
    "queued_tokens": ("QUEUED", "tokens"),
    "running_requests": ("RUNNING", ""),
    "waiting_requests": ("WAITING", ""),
    "free_tokens": ("FREE", "tokens"),
    "held_tokens": ("POOL HAS", "tokens"),
    "prefill_tokens_per_s": ("LEARNED", "tokens/s"),
    "decode_interference_s": ("DECODE", "s each"),
}
"""Columns of what was seen of a candidate, by name: head and unit. Everything else of a candidate is a term of the policy."""
SEEN_MEANINGS: Final = {
    "matched_tokens": "of the prompt, by the directory",
    "promised_tokens": "beyond it: a prompt on its way begins alike",
    "cached_tokens": "both: what the policy takes to be cached",
    "queued_tokens": "prompt tokens to be computed there",
    "running_requests": "requests that decode there",
    "waiting_requests": "requests that do not yet",
    "free_tokens": "room in the pool that holds nothing",
    "held_tokens": "cached there, of any prompt",
    "prefill_tokens_per_s": "speed, told by first tokens",
    "decode_interference_s": "what each decode adds to a first token",
}
BOOKED_MEANINGS: Final = {
    "queued_tokens": "prompt tokens booked there",
    "running_requests": "requests booked there",
}
"""The same in a fallback, which knows of bookings only."""
TERMS: Final = {
    "queue_s": ("QUEUE", "time to compute QUEUED"),
    "prefill_s": ("PREFILL", "time to compute what of the prompt is no HIT"),
    "decode_s": ("DECODES", "RUNNING x what each adds"),
    "recompute_s": ("RECOMPUTE", "PREFILL again, weighted: those who wait behind it wait for it too"),
    "displaced_s": ("DISPLACE", "time to compute again what the request drives out of the pool and somebody asks for"),
    "balance_s": ("BALANCE", "time to compute what the pool has beyond the emptiest, weighted: evens out pools"),
    "displaced_tokens": ("DRIVEN OUT", "prompt and answer beyond HIT and FREE"),
    "rate_tokens_per_s": ("RATE", "speed that the times are made with: LEARNED, small differences levelled"),
    "load_tokens": ("LOAD", "QUEUED + RUNNING"),
    "load_requests": ("LOAD", "RUNNING + WAITING"),
    "queue_requests": ("QUEUE", "RUNNING + WAITING"),
    "prefill_tokens": ("PREFILL", "QUEUED and what of the prompt is no HIT"),
    "requests": ("REQUESTS", "RUNNING + 1"),
    "ring_distance": ("DISTANCE", "from the prompt to the replica's next point on the ring"),
}
"""Head and meaning of the terms of all policies, by name."""
SUM: Final = "QUEUE + PREFILL + DECODES + RECOMPUTE + DISPLACE + BALANCE"
_UNITS: Final = ("_tokens_per_s", "_tokens", "_requests", "_s")
"""What names of terms end in, longest first."""


def explain(
    prompt: Annotated[str, typer.Argument(help="What a user would say.", show_default=False)] = "",
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read it from a file (-: standard input): text, or a request body as JSON object."
        ),
    ] = None,
    completion: Annotated[
        bool, typer.Option("--completion", help="The text is a prompt for /v1/completions, without a chat template.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="Server to ask. Default: the one running here.")] = None,
    port: Annotated[int | None, typer.Option(help="Which of several servers on this machine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Show which replica would get a request now, and every candidate with every term, best first.

    The score of `cost` is a sum in seconds, and the least wins: the expected time to the first token (QUEUE, PREFILL, DECODES),
    and what the request costs those after it (RECOMPUTE, DISPLACE, BALANCE). Under the tables is what each column means.
    """
    body = _body(_text(prompt, file), from_file=file is not None, completion=completion)
    found = _ask(_target(url, port), body)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _text(prompt: str, file: Path | None) -> str:
    if bool(prompt) == (file is not None):
        raise UsageError('Give a prompt or --file, one of them: kvatlas explain "Once upon a time".')
    if file is None:
        return prompt
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"Cannot read {file} ({reason}): check the path given with --file.") from None
    if not text:
        raise UsageError(
            f"{'Standard input' if str(file) == '-' else file} is empty: give a prompt, or a request body."
        )
    return text


def _body(text: str, *, from_file: bool, completion: bool) -> dict[str, Any]:
    """The request that is meant. A file may hold a whole one."""
    if from_file:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            if "messages" not in value and "prompt" not in value:
                raise UsageError(
                    'The file has a JSON object without "messages" or "prompt": give a request body, with a text that looks like '
                    'one as {"prompt": "..."}.'
                )
            return value
    if completion:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def _target(url: str | None, port: int | None) -> Target:
    target = find(url, port)
    if target.is_starting:
        raise ServeFailed(f"{target.url} is still starting: `kvatlas status` says when it is ready.")
    if not target.admin_key:
        http_client.get(f"{target.url}/health/live", ANSWER_S)  # a wrong address is the first thing to put right
        raise UsageError(f"Decisions are explained to operators only: set {KEY_VARIABLE} to the server's admin key.")
    return target


def _ask(target: Target, body: dict[str, Any]) -> dict[str, Any]:
    """The explanation. Raises `UsageError` for what the person can put right, `ServeFailed` for the rest."""
    if "model" not in body:
        body = {"model": _model(target), **body}
    answer = http_client.post(f"{target.url}/debug/route", body, ANSWER_S, target.admin_key)
    if answer.status == 200:
        return answer.body
    if answer.status == 401 or (answer.status == 404 and answer.code == "unknown_url"):
        raise UsageError(
            f"{target.url} does not take this admin key ({answer.error}): set {KEY_VARIABLE} to the key that it was started with."
        )
    if 400 <= answer.status < 500:
        raise UsageError(f"{target.url} refuses the request: {answer.error}")
    raise ServeFailed(answer.error)


def _model(target: Target) -> str:
    answer = http_client.get(f"{target.url}/v1/models", ANSWER_S)
    served = answer.body.get("data")
    if answer.status != 200 or not isinstance(served, list) or not served:
        raise ServeFailed(f"{target.url} does not tell which model it serves ({answer.error}): see `kvatlas status`.")
    return str(served[0]["id"])


def _show(found: dict[str, Any]) -> None:
    directory, is_blind = found["directory"], found["outcome"] == "fallback"
    lag_s = directory["lag_s"]
    lag = "" if lag_s is None else f", lag {lag_s:.3f} s, {directory['lag_entries']:,} entries behind"
    problem = f"; {directory['problem']}" if directory["problem"] else ""
    hit = (
        "how much of it is cached is not known"
        if is_blind
        else f"{found['predicted_tokens']:,} expected to be cached there"
    )
    say(f"choice     {found['replica_id'] or 'none'}: {found['reason']} ({found['policy']}, {found['outcome']})")
    say(f"prompt     {found['prompt_tokens']:,} tokens, {hit}; answer: {found['output_tokens']:,} tokens at most")
    say(f"directory  {directory['state']}{lag}{problem}")
    candidates = found["candidates"]
    if candidates:
        _show_seen(candidates, BOOKED_MEANINGS if is_blind else SEEN_MEANINGS)
        _show_terms(found, [name for name in candidates[0] if name not in SEEN and name not in ("pool_seq", "score")])
    if found["not_in_directory"]:
        say(f"not in the directory: {', '.join(found['not_in_directory'])}")


def _show_seen(candidates: list[dict[str, Any]], meanings: dict[str, str]) -> None:
    """What was known of the candidates. A column in which nothing is is left out."""
    names = [name for name in SEEN if any(one.get(name) is not None for one in candidates)]
    head, units = zip(*(SEEN[name] for name in names), strict=True)
    say("")
    print_table(head, [units, *([_cell(name, one.get(name)) for name in names] for one in candidates)])
    say("")
    told = [f"{SEEN[name][0]:<10}{meanings[name]}" for name in names if name in meanings]
    for place in range(0, len(told), 2):
        say("".join(text.ljust(56) for text in told[place : place + 2]).rstrip())


def _show_terms(found: dict[str, Any], names: list[str]) -> None:
    """What the policy made of that, and what it means."""
    heads = [TERMS[name][0] if name in TERMS else name.replace("_", " ").upper() for name in names]
    units = ["", found["score_unit"], *(_unit(name) for name in names)]
    rows = [[_cell(name, one[name]) for name in ("replica_id", "score", *names)] for one in found["candidates"]]
    say("")
    print_table(["REPLICA", "SCORE", *heads], [units, *rows])
    summed = SUM if "recompute_s" in names else "the order of the policy"
    if found["outcome"] == "fallback":
        summed = "QUEUED + RUNNING: a fallback knows no more"
    meanings = [("SCORE", f"{summed}; least wins")]
    meanings += [(head, TERMS[name][1]) for head, name in zip(heads, names, strict=True) if name in TERMS]
    say("")
    for head, meaning in meanings:
        say(f"{head:<12}{meaning}")


def _unit(name: str) -> str:
    """The unit at the end of a term's name."""
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    return unit[1:].replace("_per_s", "/s")


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name == "pool":
        return str(value)[:POOL_CHARACTERS]
    if isinstance(value, float) and not (name.endswith(("tokens", "requests")) and value.is_integer()):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
