"""Where a configuration comes from: defaults < YAML file < environment < flags, each value with its origin.

Nothing is ignored: an unknown key, an unknown `KVATLAS_` variable, a wrong type or a number out of range is a `UsageError`
that names the option, where the value came from, and the fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from cluster.api.key_list import KeyListError, parse_keys, read_keys
from cluster.config import Config
from cluster.config_options import PATTERNS, RANGES, Option, options, sections
from cluster.errors import UsageError

ENV_PREFIX = "KVATLAS_"

# Variables with the prefix that are no option, with their meaning.
OTHER_ENVIRONMENT = {
    "KVATLAS_CONFIG": "Path of the YAML file that is read when --config is not given.",
    "KVATLAS_CACHE_DIR": "Directory for converted models. Default: ~/.cache/kvatlas.",
    "KVATLAS_RUNTIME_DIR": "Directory for state files and private Redis of running servers. Default: $XDG_RUNTIME_DIR/kvatlas.",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid configuration and, for every option path, where its value came from (`default`, `file F`, `env E`, ...)."""

    config: Config
    origins: dict[str, str]


def load(file: Path | None, env: Mapping[str, str], flags: Mapping[str, tuple[str, Any]]) -> Loaded:
    """Merge the sources. `flags` maps an option path to (flag as typed, value). Raises `UsageError`."""
    if file is None and env.get("KVATLAS_CONFIG"):
        file = Path(env["KVATLAS_CONFIG"])
    known = {option.path: option for option in options()}
    values = {path: option.default for path, option in known.items()}
    origins = dict.fromkeys(known, "default")
    for path, origin, raw in [*_from_file(file, known), *_from_env(env, known), *_from_flags(flags, known)]:
        values[path] = _convert(known[path], raw, origin)
        origins[path] = origin
    _read_admin_key(values, origins)
    _check_deterministic(values, origins)
    _check_api_keys(values, origins)
    return Loaded(_build(values), origins)


def _from_file(file: Path | None, known: Mapping[str, Option]) -> Iterable[tuple[str, str, Any]]:
    if file is None:
        return
    origin = f"file {file}"
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), _OnceLoader)
    except OSError as error:
        raise UsageError(f"Cannot read {origin} ({error.strerror}): check the path given with --config.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not UTF-8 text"
        raise UsageError(f"{origin}{place} is not valid YAML ({problem}): correct it there.") from error
    names = [name for name, _ in sections()]
    for section, entries in _mapping(tree, origin, "the file").items():
        if section not in names:
            raise UsageError(_unknown("section", str(section), names, origin))
        for key, raw in _mapping(entries, origin, f"section {section}").items():
            path = f"{section}.{key}"
            if path not in known:
                raise UsageError(_unknown("option", path, known, origin))
            yield path, origin, raw


class _OnceLoader(yaml.SafeLoader):
    """YAML without repeated keys: PyYAML keeps the last one and says nothing."""


def _unique_keys(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.constructor.ConstructorError(
                problem=f"{key.value} is set twice", problem_mark=key.start_mark, note=None
            )
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_OnceLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_keys)


def _mapping(value: object, origin: str, what: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(
            f"{origin}: {what} holds {value!r} where `option: value` lines belong: indent options below it."
        )
    return value


# What Kubernetes sets in every pod for a Service whose name begins with "kvatlas".
_OF_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def _from_env(env: Mapping[str, str], known: Mapping[str, Option]) -> Iterable[tuple[str, str, Any]]:
    by_name = {option.env: path for path, option in known.items()}
    for name, raw in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or name in OTHER_ENVIRONMENT:
            continue
        if name not in by_name:
            if _OF_KUBERNETES.fullmatch(name) and "__" not in name:
                continue
            raise UsageError(_unknown("variable", name, [*by_name, *OTHER_ENVIRONMENT], "the environment"))
        yield by_name[name], f"env {name}", raw


def _from_flags(flags: Mapping[str, tuple[str, Any]], known: Mapping[str, Option]) -> Iterable[tuple[str, str, Any]]:
    for path, (flag, raw) in flags.items():
        if path not in known:
            raise UsageError(_unknown("option", path, known, flag))
        yield path, f"flag {flag}", raw


def _unknown(kind: str, name: str, known: Iterable[str], origin: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else "`kvatlas config` lists the options."
    return f"Unknown {kind} {name} in {origin}: {fix}"


def _convert(option: Option, raw: Any, origin: str) -> Any:
    """`raw` as the option's type and within its range."""
    shown = "the value given" if option.secret else repr(raw)
    try:
        if isinstance(raw, bool) and option.kind is not bool:
            raise ValueError(f"it must be {_words(option.kind)}")
        value = TypeAdapter(option.kind).validate_python(raw)
    except (ValidationError, ValueError):
        raise UsageError(f"{option.path} cannot be {shown} ({origin}): give {_words(option.kind)}.") from None
    allowed = RANGES.get(option.path)
    if allowed is not None and not allowed.low <= value <= allowed.high:
        raise UsageError(f"{option.path} cannot be {shown} ({origin}): give a number {allowed}.")
    pattern, words = PATTERNS.get(option.path, ("", ""))
    if pattern and not re.fullmatch(pattern, value, re.DOTALL):
        raise UsageError(f"{option.path} cannot be {shown} ({origin}): give {words}.")
    return value


def _words(kind: Any) -> str:
    named = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return named.get(kind) or "one of " + ", ".join(str(choice) for choice in kind.__args__)


def _read_admin_key(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Replace `http.admin_key` by the content of `http.admin_key_file` where that is given."""
    file = values["http.admin_key_file"]
    if not file:
        return
    if values["http.admin_key"]:
        raise UsageError(
            f"http.admin_key ({origins['http.admin_key']}) and http.admin_key_file ({origins['http.admin_key_file']}) "
            f"are both given: keep one."
        )
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"Cannot read the admin key from {file} ({reason}): check http.admin_key_file.") from error
    if not key:
        raise UsageError(
            f"The admin key file {file} is empty: write the key into it, or leave http.admin_key_file out."
        )
    values["http.admin_key"] = key
    origins["http.admin_key"] = f"file {file}"


def _check_deterministic(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raise `UsageError` where a deterministic engine is asked for in a mode that has none."""
    if values["engine.deterministic"] and values["engine.mode"] != "fast":
        raise UsageError(
            f"engine.deterministic ({origins['engine.deterministic']}) needs engine.mode fast, which is "
            f"{values['engine.mode']} ({origins['engine.mode']}): leave one of them out."
        )


def _check_api_keys(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raise `UsageError` for a list of API keys that the ingress could not use, and for salts per key without keys."""
    given, file = values["http.api_keys"], values["http.api_keys_file"]
    if given and file:
        raise UsageError(
            f"http.api_keys ({origins['http.api_keys']}) and http.api_keys_file ({origins['http.api_keys_file']}) "
            f"are both given: keep one."
        )
    if values["http.salt_per_key"] and not (given or file):
        raise UsageError(
            f"http.salt_per_key ({origins['http.salt_per_key']}) needs keys to make salts for: set http.api_keys or "
            f"http.api_keys_file."
        )
    path = "http.api_keys" if given else "http.api_keys_file"
    where = f"{file} ({origins[path]})" if file else origins[path]
    try:
        if given:
            parse_keys(given)
        elif file:
            read_keys(Path(file).expanduser())
    except KeyListError as error:
        raise UsageError(f"{path} cannot be used as given, {where}: {error}.") from error


def _build(values: Mapping[str, Any]) -> Config:
    parts = {}
    for name, cls in sections():
        parts[name] = cls(**{item.name: values[f"{name}.{item.name}"] for item in dataclasses.fields(cls)})
    return Config(**parts)
