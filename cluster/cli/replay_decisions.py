"""`kvatlas replay --decisions LOG`: what would another policy have decided, of the requests in a decision log?

LOG is the path of `router.decision_log`; files moved aside and those of other routers on the same machine belong to it.
`router/counterfactual.py` says what the figures mean and what they cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cluster.cli.output import print_json, print_table, say
from cluster.cli.router_options import router_options
from cluster.errors import UsageError
from router.counterfactual import Counterfactual, Reality, rerun
from router.decision_log import Reading
from router.policy import POLICIES
from router.route_config import RouteConfig

ALL: Final = "all"
HEAD: Final = ("POLICY", "DECISIONS", "CHANGED", "EQUAL", "PREDICTED", "WAS", "TTFT", "WAS", "COST", "WAS")


def run(log: Path, policy: str, as_json: bool, settings: Sequence[str] = (), seed: int = 0) -> None:
    """Prints what `policy` (a name, or `all`) would have decided. `settings`: options of the router as NAME=VALUE.

    Raises `UsageError`: no such log, nothing in it, an unknown policy or option.
    """
    configs = _configs(policy, settings)
    reading = Reading(log)
    if not reading.files:
        raise UsageError(f"There is no decision log at {log}: set router.decision_log, and give the same path here.")
    try:
        found, reality = rerun(reading, configs, seed)
    except OSError as error:
        raise UsageError(f"{log} cannot be read ({error.strerror}): check its permissions.") from None
    if not any(one.decisions or one.fallbacks or one.unscored for one in found):
        raise UsageError(f"{log} holds no decision ({reading.malformed:,} lines are none): is it a decision log?")
    if as_json:
        runs = [one.told() for one in found]
        print_json({"log": str(log), "runs": runs, "measured": reality.told(), "malformed_lines": reading.malformed})
    else:
        _show(found, reality, reading.malformed)


def _configs(policy: str, settings: Sequence[str]) -> dict[str, RouteConfig]:
    """The options for each policy that is asked for."""
    names = list(POLICIES) if policy == ALL else [policy]
    return {name: router_options(settings, name) for name in names}


def _show(found: list[Counterfactual], reality: Reality, malformed: int) -> None:
    units = ("", "", "", "of these", "tokens", "", "mean s", "", "mean s", "")
    print_table(HEAD, [units, *(_row(one.told()) for one in found)])
    first = found[0]
    left_out = [f"{first.fallbacks:,} fallbacks" if first.fallbacks else ""]
    left_out += [f"{first.unscored:,} that went to a replica the directory did not know" if first.unscored else ""]
    left_out += [f"{malformed:,} lines that are no records" if malformed else ""]
    if any(left_out):
        say(f"left out: {', '.join(text for text in left_out if text)}")
    told = reality.told()
    if told["requests"]:
        mean_s = told["ttft_mean_s"]
        ttft = "" if mean_s is None else f"; first token after {mean_s:.4f} s on average"
        say(
            f"measured: of {told['predicted_tokens']:,} tokens predicted for {told['requests']:,} requests "
            f"{told['cached_tokens']:,} were cached{ttft}"
        )


def _row(told: dict[str, Any]) -> list[object]:
    recorded, replayed = told["recorded"], told["replayed"]
    row: list[object] = [told["policy"], f"{told['decisions']:,}", f"{told['changed']:,}", f"{told['equal']:,}"]
    row += [f"{replayed['predicted_tokens']:,}", f"{recorded['predicted_tokens']:,}"]
    for name in ("ttft_mean_s", "cost_mean_s"):
        row += ["-" if side[name] is None else f"{side[name]:.4f}" for side in (replayed, recorded)]
    return row
