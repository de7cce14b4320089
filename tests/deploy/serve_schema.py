"""Ray's schema of a Serve config, made strict: Ray itself drops a key that it does not know without a word.

The keys at every level are compared with the fields of the pydantic model at that level.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema


def unknown_keys(config: Any, kind: Any = ServeDeploySchema, path: str = "") -> list[str]:
    """Paths of the keys in `config` that no field of `kind` has."""
    return list(_unknown(config, kind, path))


def _unknown(value: Any, kind: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        model = next((item for item in _parts(kind) if isinstance(item, type) and issubclass(item, BaseModel)), None)
        if model is None:  # free-form: arguments of the builder, a runtime environment
            return
        fields = {name: field.annotation for name, field in model.model_fields.items()}
        fields |= {field.alias: field.annotation for field in model.model_fields.values() if field.alias}
        for key, item in value.items():
            here = f"{path}.{key}" if path else str(key)
            if key not in fields:
                yield here
            else:
                yield from _unknown(item, fields[key], here)
    elif isinstance(value, list):
        element = next((item for item in _parts(kind) if typing.get_origin(item) is list), None)
        for position, item in enumerate(value):
            yield from _unknown(item, (typing.get_args(element) or (Any,))[0], f"{path}[{position}]")


def _parts(kind: Any) -> Iterator[Any]:
    """`kind`, or the members of the union that it is."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        for member in typing.get_args(kind):
            yield from _parts(member)
    else:
        yield kind
