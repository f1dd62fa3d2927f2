"""Penalties as plain data, for checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from proxmo.penalties.base import Penalty


def as_plain(penalty: Penalty) -> dict[str, dict[str, Any]]:
    """The fields of a penalty under the name of its class.

    The class is a key, so that a distributed checkpoint of another one lacks it, and is refused before it is read.
    """
    fields = {field.name: getattr(penalty, field.name) for field in dataclasses.fields(penalty) if field.init}
    return {type(penalty).__name__: fields}


def from_plain(penalty: Penalty | None, saved: Any) -> Penalty | None:
    """A penalty of the class of ``penalty`` with the saved fields, or an error that says why there is none."""
    name = None if penalty is None else type(penalty).__name__
    got = next(iter(saved), None) if isinstance(saved, dict) else saved
    if got != name:
        raise ValueError(f"cannot load a parameter group made with penalty {got} into one with penalty {name}")
    if penalty is None:
        return None
    fields = saved[name]
    try:
        return type(penalty)(**fields)
    except TypeError as error:
        raise ValueError(f"cannot load penalty {name} from the fields {fields}: {error}") from error
