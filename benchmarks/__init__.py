"""Benchmarks of proxmo against torch and other proximal libraries."""

import os

# OpenBLAS threads keep spinning for tens of milliseconds after a call and would take cores from the next candidate.
# With this setting they sleep after 2^16 cycles, still longer than the pauses within a call. OpenBLAS reads it when
# NumPy is imported, so it must be set first.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")
