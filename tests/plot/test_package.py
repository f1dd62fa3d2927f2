"""proxmo.plot as a package: what it needs, and what it says without it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest


def test_import_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_matplotlib(name: str) -> ModuleSpec | None:
        return None if name == "matplotlib" else find_spec(name)

    monkeypatch.setattr("importlib.util.find_spec", without_matplotlib)
    monkeypatch.delitem(sys.modules, "proxmo.plot", raising=False)
    with pytest.raises(ImportError, match=r"proxmo.plot needs matplotlib: pip install 'proxmo\[plot\]'"):
        importlib.import_module("proxmo.plot")


def test_every_function_is_in_the_changelog() -> None:
    plot = importlib.import_module("proxmo.plot")
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in plot.__all__:
        assert f"`plot.{name}`" in changelog
