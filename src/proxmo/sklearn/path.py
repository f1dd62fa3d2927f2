"""The result of `path`: models from strong to weak penalties, or from many inputs to few."""

from __future__ import annotations

from dataclasses import dataclass

from proxmo.sklearn.inputs import Array


@dataclass(frozen=True)
class RegularizationPath:
    """Models along a path, one point for each strength or each share of blocks to keep.

    Points are in the order of falling strengths, or falling shares. Each was solved from the solution before or, for
    networks over strengths, from the one after. All arrays have one row per point.

    >>> import numpy as np
    >>> path = RegularizationPath(
    ...     keeps=None, strengths=np.array([1.0, 0.1]), coefs=np.array([[0.0, 0.0], [0.9, 0.0]]),
    ...     intercepts=np.zeros(2), losses=np.array([0.5, 0.1]), objectives=np.array([0.5, 0.19]),
    ...     nonzeros=np.array([0, 1]), feature_names=np.array(["age", "bmi"]),
    ... )
    >>> len(path), path.parameter, path.values
    (2, 'strength', array([1. , 0.1]))
    >>> print(path)
    strength  inputs  loss  objective
           1       0   0.5        0.5
         0.1       1   0.1       0.19
    """

    keeps: Array | None
    """The share (or count) of inputs or weights that each model keeps; ``None`` for a path over strengths."""
    strengths: Array | None
    """The strength of the penalty of each model, falling; ``None`` for a path over ``keep``."""
    coefs: Array
    """Coefficients: points × features, or points × outputs × features for several classes or targets. For a network
    the norm of the weights that read an input, points × features."""
    intercepts: Array
    """Intercepts: one per point, or points × outputs."""
    losses: Array
    """The mean loss on the training data, without the penalty."""
    objectives: Array
    """The loss with the penalty; equal to ``losses`` for a path over ``keep``."""
    nonzeros: Array
    """How many inputs each model uses."""
    feature_names: Array | None = None
    """The names of the features, if the inputs had them."""
    scores: tuple[Array, Array] | None = None
    """Mean and standard deviation of the score over the folds of a cross-validation, if there was one."""
    best: int | None = None
    """The index of the point with the best mean score, the sparsest of equal ones."""

    @property
    def parameter(self) -> str:
        """What changes along the path, ``"keep"`` or ``"strength"``."""
        return "strength" if self.keeps is None else "keep"

    @property
    def values(self) -> Array:
        """The strengths, or the shares to keep."""
        values = self.strengths if self.keeps is None else self.keeps
        assert values is not None
        return values

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        columns: dict[str, Array] = {
            self.parameter: self.values,
            "inputs": self.nonzeros,
            "loss": self.losses,
            "objective": self.objectives,
        }
        if self.scores is not None:
            columns |= {"score": self.scores[0], "deviation": self.scores[1]}
        table = [tuple(columns), *zip(*(map("{:.4g}".format, column) for column in columns.values()), strict=True)]
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in table]
        if self.best is not None:
            lines[self.best + 1] += "  best"
        return "\n".join(lines)
