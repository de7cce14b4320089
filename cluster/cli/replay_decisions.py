"""`kvatlas replay --decisions LOG`: what would another policy have decided, of the requests in a decision log?

LOG is the path of `router.decision_log`; files moved aside and those of other routers on the same machine belong to it.
`router/counterfactual.py` says what the figures mean and what they cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cluster.cli.output import print_json, print_table, say
from cluster.cli.router_options import policies, router_options
from cluster.errors import UsageError
from router.counterfactual import Counterfactual, Reality, rerun
from router.decision_log import Reading
from router.route_config import RouteConfig

HEAD: Final = ("POLICY", "DECISIONS", "CHANGED", "EQUAL", "PREDICTED", "WAS", "TTFT", "WAS", "COST", "WAS")


LEGEND: Final = """\
CHANGED    decisions that go to another replica than the one recorded (WAS)
EQUAL      of these, those to a replica that the policy thinks no better than the one recorded
PREDICTED  prompt tokens expected to be cached at the replica chosen, in all
TTFT       expected time to the first token: queue, prefill and decodes of `cost`, whichever policy decides
COST       that, and what the request costs those after it: the whole score of `cost`"""


def run(log: Path, policy: str, as_json: bool, settings: Sequence[str] = (), seed: int = 0) -> None:
    """Prints what `policy` (names, or `all`) would have decided. `settings`: options of the router as NAME=VALUE.

    Raises `UsageError`: no such log, nothing in it, an unknown policy or option.
    """
    configs: dict[str, RouteConfig] = {name: router_options(settings, name) for name in policies(policy)}
    try:
        reading = Reading(log)
        if not reading.files:
            raise UsageError(
                f"There is no decision log at {log}: set router.decision_log, and give the same path here."
            )
        found, reality = rerun(reading, configs, seed)
    except OSError as error:
        raise UsageError(f"{log} cannot be read ({error.strerror}): check its permissions.") from None
    if not any(one.decisions or one.fallbacks or one.unscored for one in found):
        raise UsageError(f"{log} holds no decision ({_count(reading.malformed, 'other line')}): is it a decision log?")
    if as_json:
        runs = [one.told() for one in found]
        print_json({"log": str(log), "runs": runs, "measured": reality.told(), "malformed_lines": reading.malformed})
    else:
        _show(found, reality, reading.malformed)


def _show(found: list[Counterfactual], reality: Reality, malformed: int) -> None:
    units = ("", "", "", "of these", "tokens", "", "mean s", "", "mean s", "")
    print_table(HEAD, [units, *(_row(one.told()) for one in found)])
    first = found[0]
    left_out = [_count(first.fallbacks, "fallback") if first.fallbacks else ""]
    left_out += [f"{first.unscored:,} that went to a replica the directory did not know" if first.unscored else ""]
    left_out += [f"{_count(malformed, 'line')} without a record" if malformed else ""]
    if any(left_out):
        say(f"left out: {', '.join(text for text in left_out if text)}")
    told = reality.told()
    if told["requests"]:
        mean_s = told["ttft_mean_s"]
        ttft = "" if mean_s is None else f"; first token after {mean_s:.4f} s on average"
        say(
            f"measured: of {_count(told['predicted_tokens'], 'token')} predicted for {_count(told['requests'], 'request')} "
            f"{told['cached_tokens']:,} were cached{ttft}"
        )
    say(f"\n{LEGEND}")


def _row(told: dict[str, Any]) -> list[object]:
    recorded, replayed = told["recorded"], told["replayed"]
    row: list[object] = [told["policy"], f"{told['decisions']:,}", f"{told['changed']:,}", f"{told['equal']:,}"]
    row += [f"{replayed['predicted_tokens']:,}", f"{recorded['predicted_tokens']:,}"]
    for name in ("ttft_mean_s", "cost_mean_s"):
        row += ["-" if side[name] is None else f"{side[name]:.4f}" for side in (replayed, recorded)]
    return row


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
