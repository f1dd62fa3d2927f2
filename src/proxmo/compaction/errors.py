"""The error that compaction raises, and the check for optional packages."""

from __future__ import annotations

import importlib.util


class CompactionError(RuntimeError):
    """Raised when a model cannot be compacted; the message gives the reason. The model is unchanged.

    >>> issubclass(CompactionError, RuntimeError)
    True
    """


def require_package(package: str) -> None:
    """Raise `ModuleNotFoundError` with an install hint if ``package`` is missing."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ModuleNotFoundError(f"saving and loading compacted models needs {package}: pip install 'proxmo[compact]'")
