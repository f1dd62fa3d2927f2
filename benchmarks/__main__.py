"""`python -m benchmarks`: time proxmo, torch and installed peer libraries on this machine.

Candidates take turns in one process, so that ratios are reliable even where absolute times are not. Keep the machine
otherwise idle.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from benchmarks import require
from benchmarks.curves import curves
from benchmarks.kernels import kernels
from benchmarks.output import made_with
from benchmarks.steps import adam_steps, steps
from benchmarks.sweep import sweep
from benchmarks.training import training
from proxmo.files import written_whole

SUITES = {
    "steps": steps,
    "adam_steps": adam_steps,
    "kernels": kernels,
    "training": training,
    "sweep": sweep,
    "curves": curves,
}


def main() -> None:
    """Run the suites named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    suites = ", ".join(SUITES)
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=list(SUITES), help=f"{suites} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder for tables and figures")
    parser.add_argument("--repeats", type=int, default=30, help="timings per candidate")
    chosen = parser.parse_args()
    if unknown := set(chosen.suites) - set(SUITES):
        parser.error(f"SUITE must be one of {suites}, got {', '.join(sorted(unknown))}")
    if chosen.repeats < 3:
        parser.error(f"--repeats must be at least 3, got {chosen.repeats}")
    require("numba")
    versions = made_with()
    Console().print(", ".join(f"{name} {version}" for name, version in versions.items()), soft_wrap=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    with written_whole(chosen.out / "made_with.json") as path:
        path.write_text(json.dumps(versions, indent=1), encoding="utf-8")
    for suite in chosen.suites:
        SUITES[suite](chosen.out, chosen.repeats)


if __name__ == "__main__":
    main()
