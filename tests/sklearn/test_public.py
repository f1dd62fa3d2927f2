"""The module itself: documented, and imported only when asked for."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import proxmo.sklearn

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


@pytest.mark.parametrize("name", proxmo.sklearn.__all__)
def test_public_names_are_documented(name: str) -> None:
    documentation = inspect.getdoc(getattr(proxmo.sklearn, name)) or ""
    assert documentation.splitlines()[0].endswith(".")
    assert ">>>" in documentation
    assert f"`{name}`" in CHANGELOG.read_text(encoding="utf-8")
