"""Imports point downwards only: a layer never imports one above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import proxmo

SOURCE = Path(proxmo.__file__).parent
# From the bottom up; modules in one set may import each other.
LAYERS = [
    {"theory", "shards", "eager", "checks", "files", "progress"},
    {"kernels"},
    {"penalties"},
    {"secants"},
    {"optim"},
    {"layers", "schedules", "criteria", "estimates", "iterates", "proxy", "refit", "targets", "history"},
    {"compaction"},
    {"shrinking"},
    {"plot", "sklearn"},
    {"experiments"},
    {"cli"},
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def imported_layers(path: Path) -> set[str]:
    """Return the first parts of all modules of proxmo that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "proxmo":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("proxmo."):
            found.add(str(node.module).split(".")[1])
    return found & HEIGHT.keys()


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if layer != "__init__":
        assert [name for name in imported_layers(path) if HEIGHT[name] > HEIGHT[layer]] == []
