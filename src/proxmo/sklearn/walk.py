"""Walking along a path of strengths or of shares to keep, with warm starts and cross-validation."""

from __future__ import annotations

import copy
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from sklearn.utils import _safe_indexing, indexable
from sklearn.utils.metadata_routing import get_routing_for_object
from torch import Tensor

from proxmo import checks
from proxmo.penalties import Penalty
from proxmo.penalties.trimmed import check_keep
from proxmo.sklearn.goals import Goal
from proxmo.sklearn.inputs import Array
from proxmo.sklearn.linear import LinearFit
from proxmo.sklearn.path import RegularizationPath
from proxmo.sklearn.problem import Outcome

if TYPE_CHECKING:
    from proxmo.sklearn.base import ProxEstimator

RANGE = 1e-3  # the smallest strength of a grid, relative to the largest
HALVINGS = 12  # in the search for the largest one
RISE = 4  # factor on the strength in the search for the largest one of a network,
RISES = 15  # and how often
SMALLEST = 1e-300  # the smallest strength of all
LEAST = 1e-12  # where the search starts, relative to the strength that leaves out inputs of any kind,
LEAST_OF_NETWORK = 1 / 64  # and for networks: low, so that they learn from the inputs before these leave


def trace(
    estimator: ProxEstimator, X: Any, y: Any, strengths: Any, keeps: Any, sample_weight: Any, cv: Any, scoring: Any
) -> tuple[RegularizationPath, int]:
    """Return the path and how many fits did not converge; `ProxEstimator.path` has the arguments."""
    if (strengths is None) == (keeps is None):
        raise ValueError(f"path takes strengths or keeps, got strengths={strengths!r} and keeps={keeps!r}")
    whole = copy.copy(estimator)
    walk = Walk(whole, X, y, sample_weight)
    name, values = walk.grid(strengths, keeps)
    models, outcomes = zip(*walk.along(name, values), strict=True)
    unfinished, scores = sum(not outcome.converged for outcome in outcomes), None
    if cv is not None:
        scores, more = _cross_validate(estimator, X, y, sample_weight, name, values, cv, scoring)
        unfinished += more
    nonzeros = np.array([model.selected_.sum() for model in models])
    path = RegularizationPath(
        keeps=values if name == "keep" else None,
        strengths=values if name == "strength" else None,
        coefs=np.stack([_coefficients(model) for model in models]),
        intercepts=np.stack([_intercepts(model) for model in models]),
        losses=np.array([outcome.loss for outcome in outcomes]),
        objectives=np.array([outcome.objective for outcome in outcomes]),
        nonzeros=nonzeros,
        feature_names=getattr(whole, "feature_names_in_", None),
        scores=scores,
        best=None if scores is None else _best(scores[0], nonzeros),
    )
    return path, unfinished


class Walk:
    """Fits models of a copy of an estimator along a path; the copy is checked, and knows classes and features."""

    def __init__(self, estimator: ProxEstimator, X: Any, y: Any, sample_weight: Any) -> None:
        estimator._check_arguments()
        self._estimator = estimator
        self._data = estimator._validate(X, y, sample_weight)

    def grid(self, strengths: Any, keeps: Any) -> tuple[str, Array]:
        """Return what changes along the path, and its values in falling order."""
        if keeps is not None:
            shares = [check_keep("keeps", keep) for keep in _listed("keeps", keeps)]
            if len(set(map(type, shares))) > 1:
                raise ValueError(f"keeps must be all shares (floats) or all counts (integers), got {keeps!r}")
            Goal.of(self._estimator.penalty, None, shares[0])
            return "keep", np.sort(shares)[::-1]
        if not isinstance(strengths, Integral):
            checked = [checks.nonnegative("strengths", strength) for strength in _listed("strengths", strengths)]
            return "strength", np.sort(checked)[::-1]
        count = checks.count("strengths", strengths, least=1)
        largest = self._strength_without_inputs()
        return "strength", largest * np.geomspace(1, RANGE, count) if count > 1 else np.array([largest])

    def along(self, name: str, values: Array) -> list[tuple[ProxEstimator, Outcome]]:
        """Return a fitted estimator for each value, and what its fit was like."""
        fitter, order = self._estimator._fitter(*self._data), values.tolist()
        # Inputs leave a network for good, as neurons without inputs get no gradient: strengths must rise.
        rising = name == "strength" and bool(self._estimator._hidden())
        fitted = []
        for value in reversed(order) if rising else order:
            model = copy.copy(self._estimator).set_params(**{"strength": None, "keep": None, name: value})
            outcome = fitter.fit(model._goal())
            model._take(outcome)
            fitted.append((model, outcome))
        return fitted[::-1] if rising else fitted

    def _strength_without_inputs(self) -> float:
        """Return a strength that leaves no input in the model: for networks the first that does as it rises."""
        hidden = self._estimator._hidden()
        strength = self._largest_strength(LEAST_OF_NETWORK if hidden else LEAST)
        if not hidden:
            return strength
        fitter = copy.copy(self._estimator).set_params(early_stopping=False)._fitter(*self._data)
        for _ in range(RISES):
            if not fitter.fit(Goal.of(self._estimator.penalty, strength, None)).layers.weights[0].any():
                return strength
            strength *= RISE
        raise ValueError(
            f"strengths must be a list for this network: {self._estimator.penalty!r} left inputs in it up to {strength}"
        )

    def _largest_strength(self, least: float) -> float:
        """Return the smallest strength that leaves no input in a linear model.

        It is at least a share ``least`` of the strength that leaves out inputs of any kind.
        """
        linear = copy.copy(self._estimator).set_params(hidden=(), early_stopping=False)
        fit = linear._fitter(*self._data)
        assert isinstance(fit, LinearFit)
        gradient, largest = fit.fit_null()
        return self._smallest_strength(fit, gradient, least * self._smallest_strength(fit, largest, SMALLEST))

    def _smallest_strength(self, fit: LinearFit, gradient: Tensor, least: float) -> float:
        """Return the smallest strength >= ``least``, up to a part in a thousand, with zero as a fixed point."""

        def leaves_nothing(strength: float) -> bool:
            return _is_fixed(fit.in_units(Goal.of(self._estimator.penalty, strength, None).penalty), gradient)

        low, high = least, max(least, float(gradient.norm()))
        while not leaves_nothing(high):
            low, high = high, 16 * high
            if high > 1e100:
                raise ValueError(
                    f"no strength of {self._estimator.penalty!r} leaves inputs out; give strengths as a list"
                )
        while high / low > 16:
            middle = high / 16
            low, high = (low, middle) if leaves_nothing(middle) else (middle, high)
        if leaves_nothing(low):
            return low
        for _ in range(HALVINGS):
            middle = float(np.sqrt(low * high))
            low, high = (low, middle) if leaves_nothing(middle) else (middle, high)
        return high


def _listed(name: str, values: Any) -> list[Any]:
    """Return a number, or the numbers of a sequence, as a list; an integer stays one."""
    values = values.tolist() if isinstance(values, np.ndarray) else values
    found = [values] if isinstance(values, (Number, str)) else list(values)
    if not found:
        raise ValueError(f"{name} must have at least one value, got {values!r}")
    return found


@torch.no_grad()
def _is_fixed(penalty: Penalty | None, gradient: Tensor) -> bool:
    """Whether a step from zero against the gradient ends at zero."""
    assert penalty is not None
    point = -gradient
    penalty.prox_([point], 1.0)
    return not bool(point.any())


def _cross_validate(
    estimator: ProxEstimator, X: Any, y: Any, sample_weight: Any, name: str, values: Array, cv: Any, scoring: Any
) -> tuple[tuple[Array, Array], int]:
    """Return mean and standard deviation of the scores over the folds, and how many fits did not converge."""
    if isinstance(scoring, (list, tuple, set, dict)):
        raise TypeError(f"scoring must be one name of a score or one function, got {scoring!r}")
    folds = check_cv(cv, y, classifier=is_classifier(estimator))
    if get_routing_for_object(folds).consumes("split", {"groups"}):
        raise ValueError(f"cv must not need groups, got {cv!r}; pass list(cv.split(X, y, groups)) instead")
    scorer = check_scoring(estimator, scoring)
    X, y, sample_weight = indexable(X, y, None if isinstance(sample_weight, Number) else sample_weight)
    scores, unfinished = [], 0
    for train, test in folds.split(X, y):
        known = [None if a is None else _safe_indexing(a, train) for a in (X, y, sample_weight)]
        walk = Walk(copy.copy(estimator), *known)
        unseen = _safe_indexing(X, test), _safe_indexing(y, test)
        models, outcomes = zip(*walk.along(name, values), strict=True)
        scores.append([scorer(model, *unseen) for model in models])
        unfinished += sum(not outcome.converged for outcome in outcomes)
    return (np.mean(scores, axis=0), np.std(scores, axis=0)), unfinished


def _best(means: Array, nonzeros: Array) -> int:
    """Return the index of the best mean score; of equal ones that with the fewest inputs."""
    return int(np.lexsort((nonzeros, -means))[0])


def _coefficients(model: ProxEstimator) -> Array:
    weight = model.coefs_[0]
    if len(model.coefs_) > 1:
        weight = np.linalg.norm(weight, axis=0, keepdims=True)
    return weight[0] if len(weight) == 1 else weight


def _intercepts(model: ProxEstimator) -> Any:
    bias = model.intercepts_[-1]
    return bias[0] if len(bias) == 1 else bias
