"""Small real data sets for the comparisons. Rows are scaled to unit length, as in the papers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sklearn import datasets


class Dataset(NamedTuple):
    """Inputs of shape (n, d), and class indices from 0."""

    name: str
    inputs: Tensor
    classes: Tensor

    @property
    def size(self) -> int:
        return len(self.inputs)

    @property
    def class_count(self) -> int:
        return int(self.classes.max()) + 1


def embedded(name: str) -> Dataset:
    """Load ``"breast-cancer"``, ``"digits"`` or ``"wine"``, which ship with scikit-learn."""
    load = {
        "breast-cancer": datasets.load_breast_cancer,
        "digits": datasets.load_digits,
        "wine": datasets.load_wine,
    }[name]
    inputs, labels = load(return_X_y=True)
    spread = inputs.std(0)
    standardized = (inputs - inputs.mean(0)) / np.where(spread > 0, spread, 1)
    return _scaled(name, standardized, labels)


def from_file(path: Path) -> Dataset:
    """Load a file in LIBSVM format (plain, gz or bz2), such as a9a or mushrooms."""
    inputs, labels = datasets.load_svmlight_file(str(path))
    return _scaled(path.name.split(".")[0], inputs.toarray(), labels)


def _scaled(name: str, inputs: np.ndarray, labels: np.ndarray) -> Dataset:
    lengths = np.linalg.norm(inputs, axis=1, keepdims=True)
    _, classes = np.unique(labels, return_inverse=True)
    return Dataset(name, torch.tensor(inputs / np.where(lengths > 0, lengths, 1)), torch.tensor(classes))
