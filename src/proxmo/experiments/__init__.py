"""The experiments of the paper, written with nothing but the public API."""
