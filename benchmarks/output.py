"""What a benchmark leaves behind: numbers for programs, a figure, and one table, in a file and on the screen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from proxmo.files import written_whole


def write(folder: Path, name: str, numbers: Any, figure: Figure, columns: tuple[str, ...], rows: list[Any]) -> None:
    """Write ``name.json``, ``name.png`` and ``name.md`` to a folder, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(folder / f"{name}.json") as path:
        path.write_text(json.dumps(_finite(numbers), indent=1), encoding="utf-8")
    with written_whole(folder / f"{name}.png") as path:
        figure.savefig(path, dpi=110)
    with written_whole(folder / f"{name}.md") as path:
        path.write_text(_markdown(columns, rows), encoding="utf-8")
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(width=170).print(table, f"figure, table and numbers: {folder}", soft_wrap=True)


def _markdown(columns: tuple[str, ...], rows: list[Any]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _finite(data: Any) -> Any:
    """JSON has no infinity: what has diverged becomes null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
