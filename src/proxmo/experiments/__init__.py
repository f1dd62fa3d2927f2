"""The experiments of the paper, written with the public API only."""
