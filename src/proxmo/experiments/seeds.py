"""Ranges of seeds as text: the settings of a run have one, merged settings have several."""

from __future__ import annotations


def as_text(first: int, count: int) -> str:
    """Return ``count`` seeds from ``first`` on as text.

    >>> as_text(0, 3), as_text(5, 1)
    ('0-2', '5')
    """
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def as_range(text: str) -> range:
    """Return the seeds of a text.

    >>> as_range("0-2"), as_range("5")
    (range(0, 3), range(5, 6))
    """
    first, _, last = str(text).partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found:
        raise ValueError(f"{text!r} has no seeds")
    return found
