"""A few of the digits, for runs that train networks; worker processes import it, so it imports little."""

from __future__ import annotations

from dataclasses import replace

from proxmo.experiments import data
from proxmo.experiments.images import Images, Split


def few_images(name: str = "digits", root: None = None, *, train: int = 96, test: int = 50) -> Images:
    """Stand in for `proxmo.experiments.data.load`."""
    whole = data.load(name, root)
    return replace(
        whole,
        train=Split(whole.train.images[:train], whole.train.labels[:train]),
        test=Split(whole.test.images[:test], whole.test.labels[:test]),
    )
