"""Write the results of a benchmark: numbers, a figure and a table, which is also printed."""

from __future__ import annotations

import datetime
import json
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from proxmo.files import written_whole

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
PACKAGES = {
    *("proxmo", "torch", "numba", "numpy", "proximal-gradient", "proxop", "jax", "jaxopt", "pyproximal", "copt"),
    *("proxtorch", "torchao", "skglm", "scikit-learn", "lassonet"),
}


def write(folder: Path, name: str, numbers: Any, figure: Figure, columns: tuple[str, ...], rows: list[Any]) -> None:
    """Write ``name.json``, ``name.png`` and ``name.md`` to ``folder``, and print the table."""
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
    Console(width=170).print(table, f"figure, table and numbers are in {folder}", soft_wrap=True)


def bars(axes: Any, values: dict[str, float], title: str, orange: str, blue: str | tuple[str, ...]) -> None:
    """Draw horizontal bars, coloured by the endings of their names; other libraries and torch's SGD are grey."""

    def colour(name: str) -> str:
        if name.startswith("SGD"):
            return GREY
        return ORANGE if name.endswith(orange) else BLUE if name.endswith(blue) else GREY

    drawn = axes.barh(list(values), list(values.values()), color=list(map(colour, values)))
    axes.bar_label(drawn, fmt="%.3g", padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def made_with() -> dict[str, str]:
    """Return the date, the versions of the packages, and the processor."""
    packages = [dist for dist in metadata.distributions() if dist.metadata["Name"].lower() in PACKAGES]
    versions = {dist.metadata["Name"].lower(): dist.version for dist in packages}
    when = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "date": when,
        "python": platform.python_version(),
        "processor": _processor(),
        **dict(sorted(versions.items())),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _markdown(columns: tuple[str, ...], rows: list[Any]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _finite(data: Any) -> Any:
    """Replace non-finite floats by ``None``, since JSON has no infinity."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
