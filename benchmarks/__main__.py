"""`python -m benchmarks`: how fast steps and kernels are here, beside torch and beside peers that are installed."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import speed


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=speed.__doc__)
    parser.add_argument("suites", nargs="*", choices=["steps", "kernels"], default=["steps", "kernels"])
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder for tables and figures")
    parser.add_argument("--repeats", type=int, default=30, help="how often each candidate is timed")
    chosen = parser.parse_args()
    if "steps" in chosen.suites:
        speed.steps(chosen.out, chosen.repeats, list(speed.MODELS))
    if "kernels" in chosen.suites:
        speed.kernels(chosen.out, chosen.repeats, speed.MATRICES)


if __name__ == "__main__":
    main()
