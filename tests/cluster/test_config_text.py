"""Documentation of the options: complete, and the example file is what the code says."""

from __future__ import annotations

from pathlib import Path

from cluster.config import Config
from cluster.config_options import options, sections
from cluster.config_sources import load
from cluster.config_text import MASK, example, rows

EXAMPLE = Path(__file__).parents[2] / "deploy" / "config.example.yaml"


def test_every_option_is_documented_with_a_sentence() -> None:
    undocumented = [option.path for option in options() if not option.doc.endswith(".")]
    assert not undocumented
    assert all((cls.__doc__ or "").strip() for _, cls in sections())


def test_the_example_file_is_current() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") == example(), (
        "run: kvatlas config --example > deploy/config.example.yaml"
    )


def test_the_example_file_is_the_defaults() -> None:
    assert load(EXAMPLE, {}, {}).config == Config()


def test_the_example_names_every_option_and_fits_a_screen() -> None:
    lines = example().splitlines()
    for option in options():
        assert any(line.startswith(f"  {option.path.split('.')[1]}: ") for line in lines)
    assert max(map(len, lines)) <= 120


def test_secrets_are_masked_and_empty_ones_shown_empty() -> None:
    def shown(env: dict[str, str]) -> object:
        return next(row["value"] for row in rows(load(None, env, {})) if row["path"] == "http.admin_key")

    assert shown({"KVATLAS_HTTP__ADMIN_KEY": "s3cret"}) == MASK
    assert shown({}) == ""
