"""Benchmarks of proxmo against torch and other proximal libraries."""

import os
import sys
from importlib.util import find_spec

# OpenBLAS threads keep spinning for tens of milliseconds after a call and would take cores from the next candidate.
# With this setting they sleep after 2^16 cycles, still longer than the pauses within a call. OpenBLAS reads it when
# NumPy is imported, so it must be set first.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")


def require(*modules: str) -> None:
    """Exit with the command that installs them if any of these modules is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        sys.exit(f"benchmarks need {', '.join(missing)}: run pip install 'proxmo[reproduce,fast]'")


require("matplotlib", "rich", "sklearn", "threadpoolctl")
