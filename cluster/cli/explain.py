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
UNITS: Final = ("_tokens_per_s", "_tokens", "_requests", "_blocks", "_s")
"""What names of columns end in, longest first: it gets a line of its own in the head of the table."""


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
    """Show which replica would get a request now, and every candidate with every term, best first."""
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
        if str(file) == "-":
            return sys.stdin.read()
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"Cannot read {file} ({reason}): check the path given with --file.") from None


def _body(text: str, *, from_file: bool, completion: bool) -> dict[str, Any]:
    """The request that is meant. A file may hold a whole one."""
    if from_file:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and ("messages" in value or "prompt" in value):
            return value
    if completion:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def _target(url: str | None, port: int | None) -> Target:
    target = find(url, port)
    if target.is_starting:
        raise ServeFailed(f"{target.url} is still starting: `kvatlas status` says when it is ready.")
    if not target.admin_key:
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
    directory = found["directory"]
    lag_s = directory["lag_s"]
    lag = "" if lag_s is None else f", lag {lag_s:.3f} s, {directory['lag_entries']:,} entries behind"
    problem = f"; {directory['problem']}" if directory["problem"] else ""
    say(f"choice     {found['replica_id'] or 'none'}: {found['reason']} ({found['policy']}, {found['outcome']})")
    say(f"prompt     {found['prompt_tokens']:,} tokens, {found['predicted_tokens']:,} expected to be cached there")
    say(f"directory  {directory['state']}{lag}{problem}")
    names = list(found["candidates"][0]) if found["candidates"] else []
    split = [_split(name) for name in names]
    units = [found["score_unit"] if name == "score" else unit for name, (_, unit) in zip(names, split, strict=True)]
    rows = [[_cell(name, candidate[name]) for name in names] for candidate in found["candidates"]]
    print_table([head for head, _ in split], [units, *rows])
    if found["not_in_directory"]:
        say(f"not in the directory: {', '.join(found['not_in_directory'])}")


def _split(name: str) -> tuple[str, str]:
    """A column's name as (head, unit)."""
    for unit in UNITS:
        if name.endswith(unit):
            return name[: -len(unit)].replace("_", " ").upper(), unit[1:].replace("_per_s", "/s")
    return name.removesuffix("_id").replace("_", " ").upper(), ""


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and not (name.endswith("_tokens") and value.is_integer()):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
