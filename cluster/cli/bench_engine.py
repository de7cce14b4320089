"""`kvatlas bench engine`: how near the engine comes to what the machine can do, in process and through HTTP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from actors.config import Mode
from cluster.bench.engine_plan import Plan
from cluster.cli.output import complain, print_json, print_table
from cluster.errors import UsageError


def engine(
    model: Annotated[str, typer.Option(help="`demo`, a directory, or a hub id.")] = Plan().model,
    grid: Annotated[bool, typer.Option("--grid", help="Measure decoding, for each context and batch.")] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the times of a step for `kvatlas replay --calibration`."),
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="The same once more through HTTP, on private servers.")] = False,
    mode: Annotated[str, typer.Option(help="`fast` (bfloat16) or `exact` (float32).")] = Plan().mode,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With engine.deterministic, to see what it costs.")
    ] = False,
    ctx: Annotated[str, typer.Option(metavar="N,N", help="Contexts of the grid, in tokens.")] = "64,512,1500",
    batch: Annotated[str, typer.Option(metavar="N,N", help="Batches of the grid.")] = "1,8,16",
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="How often everything is measured; the median counts.")
    ] = Plan().rounds,
    steps: Annotated[int, typer.Option(min=4, max=1024, help="Decode steps of a measurement.")] = Plan().steps,
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Prompt whose time to first token is measured.")
    ] = Plan().prompt_tokens,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Of one engine; two share them.")] = Plan().threads,
    quick: Annotated[bool, typer.Option("--quick", help="One round: a look, not a measurement.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Measure the engine beside the machine's own bandwidth and matrix products. Takes up to four minutes, --http four more.

    A fraction is decoded tokens a second over what they would be if reading weights and contexts were all there is to do. The
    largest batch is also shared by two engines.
    """
    if mode not in get_args(Mode):
        raise UsageError(f"--mode {mode} is no mode: choose from {', '.join(get_args(Mode))}.")
    if deterministic and mode != "fast":
        raise UsageError(f"--deterministic is for --mode fast, not {mode}: leave one of them out.")
    if calibrate is not None:
        _check(calibrate, grid)
    plan = Plan(
        model=model,
        mode="exact" if mode == "exact" else "fast",
        contexts=_numbers("--ctx", ctx) if grid else (),
        batches=_numbers("--batch", batch) if grid else (),
        rounds=1 if quick else rounds,
        steps=steps,
        prompt_tokens=prompt_tokens,
        threads=threads,
        http=http,
        calibrate=calibrate is not None,
        deterministic=deterministic,
    )

    from cluster.bench import report
    from cluster.bench.engine_run import measure
    from kvpool import DEFAULT_DIRECTORY

    told, found = measure(plan, DEFAULT_DIRECTORY, _tell)
    told = {**told, **_said(plan), "machine": report.machine()}
    if calibrate is not None and found is not None:
        from cluster.bench import engine_fit

        engine_fit.write(calibrate, found, engine_fit.comment(plan, told, found))
        told["calibration"] = {**dataclasses.asdict(found.times), "error": found.error}
    _print(told, as_json)


def _said(plan: Plan) -> dict[str, Any]:
    """What of the plan the report repeats."""
    names = ("model", "mode", "deterministic", "rounds", "steps", "prompt_tokens", "threads")
    return {name: getattr(plan, name) for name in names}


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Ascending whole numbers from a comma-separated list. Raises `UsageError`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= 1 << 20 for part in parts):
        raise UsageError(
            f"{option} {text} is no list of whole numbers from 1 on: write them with commas, as in 64,512."
        )
    return tuple(sorted({int(part) for part in parts}))


def _check(file: Path, grid: bool) -> None:
    """Before minutes of measuring. Raises `UsageError`."""
    if not grid:
        raise UsageError("--calibrate needs the steps of the grid: add --grid.")
    if file.is_dir() or not file.parent.is_dir():
        raise UsageError(
            f"--calibrate {file} can be no file (its directory is missing, or it is one): give another path."
        )


def _print(told: dict[str, Any], as_json: bool) -> None:
    from cluster.bench import engine_report

    doubt = engine_report.doubt(told)
    if doubt:
        complain(f"kvatlas: {doubt}")
    if as_json:
        print_json(told)
        return
    if told["grid"]:
        print_table(*engine_report.grid(told))
        print()
    print_table(engine_report.FIGURES, engine_report.figure_rows(told))
    print(f"\n{engine_report.startup(told)}")
    print(engine_report.setting(told))


def _tell(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    typer.echo(text, err=True)
