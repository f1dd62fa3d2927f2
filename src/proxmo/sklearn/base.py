"""What classifiers and regressors share: arguments, the choice of the method, fitted attributes, paths."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from typing_extensions import Self

from proxmo import checks
from proxmo.sklearn.goals import Goal
from proxmo.sklearn.inputs import Array, Inputs
from proxmo.sklearn.linear import LinearFit
from proxmo.sklearn.path import RegularizationPath
from proxmo.sklearn.problem import Layers, Outcome, Problem, Task
from proxmo.sklearn.stochastic import Samples, StochasticFit
from proxmo.sklearn.streams import Stream
from proxmo.sklearn.walk import trace

FULL_STEPS = 10_000  # steps of a linear model on all samples
EPOCHS = 100  # of a network
BATCHES = 32  # per epoch at least, as far as batches of 16 samples allow
DTYPES = (np.float64, np.float32)


def takes_streams(estimator: ProxEstimator) -> bool:
    """Whether `partial_fit` makes sense, for ``available_if``; raise if it does not."""
    if estimator.keep is not None:
        raise AttributeError("partial_fit needs a strength: keep removes inputs over a number of steps that is known")
    if estimator.early_stopping:
        raise AttributeError("partial_fit needs early_stopping=False: when to stop a stream is up to the caller")
    return True


def check_sum(weights: Array, samples: str) -> None:
    """Raise if no sample counts."""
    if not weights.sum() > 0:
        raise ValueError(f"the weights of {samples} must have a positive sum, got {weights.sum()}")


class ProxEstimator(BaseEstimator):  # type: ignore[misc]
    """The base class of `ProxClassifier` and `ProxRegressor`."""

    penalty: Any
    strength: Any
    keep: Any
    hidden: Any
    loss: Any
    fit_intercept: Any
    max_iter: Any
    tol: Any
    batch_size: Any
    early_stopping: Any
    validation_fraction: Any
    n_iter_no_change: Any
    random_state: Any
    verbose: Any

    coefs_: list[Array]
    intercepts_: list[Array]
    n_iter_: int
    loss_curve_: list[float]
    n_features_in_: int

    @abstractmethod
    def _task(self, y: Array, weights: Array, dtype: Any) -> Task:
        """Return what to predict, from targets that `_validate` returned."""

    @abstractmethod
    def _validate(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Array, Array]:
        """Return inputs, targets and weights of samples, checked."""

    def _validate_inputs(self, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=DTYPES, **options)
        if sparse.issparse(X) and not X.has_canonical_format:
            X = X.copy()
            X.sum_duplicates()  # parts of one entry are not entries of their own when columns are measured
        return X, y

    def _weights(self, sample_weight: Any, X: Any) -> Array:
        """Return the weights of the samples."""
        weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        check_sum(weights, "all samples")
        return weights

    def _goal(self) -> Goal:
        return Goal.of(self.penalty, self.strength, self.keep)

    def _check_arguments(self) -> None:
        for name in ("fit_intercept", "early_stopping"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        checks.nonnegative("tol", self.tol)
        for name in ("max_iter", "batch_size"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name), least=1)
        checks.count("n_iter_no_change", self.n_iter_no_change, least=1)
        takes = "a share in (0, 1)"
        if checks.share("validation_fraction", self.validation_fraction, takes=takes) == 1:
            raise ValueError(f"validation_fraction must be {takes}, got {self.validation_fraction!r}")
        self._hidden()

    def _hidden(self) -> tuple[int, ...]:
        sizes = self.hidden.tolist() if isinstance(self.hidden, np.ndarray) else self.hidden
        sizes = (sizes,) if isinstance(sizes, Integral) else sizes
        if not isinstance(sizes, Sequence) or isinstance(sizes, str):
            raise TypeError(f"hidden must be the size of a layer or a sequence of sizes, got {self.hidden!r}")
        return tuple(checks.count("hidden", size, least=1) for size in sizes)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model.

        Args:
            X: inputs, an array, a data frame or a scipy sparse matrix of shape (samples, features).
            y: targets.
            sample_weight: how much each sample counts; all alike by default.
        """
        self._check_arguments()
        goal = self._goal()
        X, y, weights = self._validate(X, y, sample_weight)
        self.__dict__.pop("_stream", None)
        with torch.inference_mode(False), torch.enable_grad():
            outcome = self._fitter(X, y, weights).fit(goal)
        self._take(outcome)
        if not outcome.converged:
            warnings.warn(
                f"the objective may still be off by more than tol={self.tol} after {self.n_iter_} steps: increase "
                "max_iter, or the strength",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _fitter(self, X: Any, y: Array, weights: Array) -> LinearFit | StochasticFit:
        """Return what fits models to goals: all samples at once for linear models, otherwise mini-batches."""
        task = self._task(y, weights, X.dtype)
        hidden, verbose = self._hidden(), bool(self.verbose)
        if not (hidden or self.early_stopping):
            max_iter = self.max_iter or FULL_STEPS
            return LinearFit(self._problem(X, task, weights), tol=self.tol, max_iter=max_iter, verbose=verbose)
        random = check_random_state(self.random_state)
        held_back = None
        if self.early_stopping:
            strata = self._strata(y)
            least = 1 if strata is None else len(np.unique(strata))  # one sample of each class
            count = max(least, math.ceil(self.validation_fraction * len(weights)))
            if len(weights) - count < least:
                raise ValueError(
                    f"early_stopping holds back {count} of the samples and must leave {least} or more, got "
                    f"n_samples={len(weights)}"
                )
            rows = np.arange(len(weights))
            train, held = train_test_split(rows, test_size=count, random_state=random, stratify=strata)
            check_sum(weights[train], "the samples that are trained on")
            check_sum(weights[held], "the samples that are held back")
            problem = self._problem(X[train], task.take(train), weights[train])
            inputs, shares = Inputs.of(X[held], problem.columns), weights[held] / weights[held].sum()
            held_back = Samples(inputs, task.take(held), torch.from_numpy(shares).to(problem.dtype))
        else:
            problem = self._problem(X, task, weights)
        return StochasticFit(
            problem,
            held_back,
            hidden=hidden,
            epochs=self.max_iter or EPOCHS,
            batch_size=self._batch_size(len(problem.weights)),
            patience=self.n_iter_no_change,
            tol=self.tol,
            random=random,
            verbose=verbose,
        )

    def _batch_size(self, samples: int) -> int:
        return self.batch_size or min(256, max(16, samples // BATCHES))

    def _strata(self, y: Array) -> Array | None:
        """Return what samples are to be split by alike."""
        return None

    def _problem(self, X: Any, task: Task, weights: Array) -> Problem:
        one_scale = self._goal().needs_one_scale
        return Problem.of(X, task, weights, fit_intercept=bool(self.fit_intercept), one_scale=one_scale)

    def _take(self, outcome: Outcome) -> None:
        """Set the fitted attributes."""
        self.coefs_, self.intercepts_ = outcome.layers
        self._with_intercepts = bool(self.fit_intercept)
        self.loss_curve_, self.n_iter_ = outcome.curve, len(outcome.curve)

    def path(
        self,
        X: Any,
        y: Any,
        *,
        strengths: Any = None,
        keeps: Any = None,
        sample_weight: Any = None,
        cv: Any = None,
        scoring: Any = None,
    ) -> RegularizationPath:
        """Fit a model for each of several strengths, or shares to keep, each from the one before.

        The estimator itself is not fitted. For networks, each model after the first takes a quarter of the epochs, and
        strengths are solved from the smallest to the largest, since a network without inputs does not get them back.

        Args:
            X: inputs.
            y: targets.
            strengths: strengths in place of that of the estimator, or how many, from the smallest one that leaves no
                input down to a thousandth of it; for networks from one that leaves no input, found by trying.
            keeps: shares (or counts) of inputs or weights to keep, in place of ``strengths``.
            sample_weight: how much each sample counts.
            cv: the number of folds, or a splitter of scikit-learn, to score each point by cross-validation.
            scoring: what to score by, as for ``GridSearchCV``; by default the method ``score``.
        """
        with torch.inference_mode(False), torch.enable_grad():
            path, unfinished = trace(self, X, y, strengths, keeps, sample_weight, cv, scoring)
        if unfinished:
            warnings.warn(
                f"the objective may still be off by more than tol={self.tol} in {unfinished} of the fits of the path: "
                "increase max_iter, or leave out the smallest strengths",
                ConvergenceWarning,
                stacklevel=2,
            )
        return path

    def _learn(self, X: Any, y: Array, weights: Array) -> None:
        """Go through a part of a stream once."""
        goal, hidden, layers = self._goal(), self._hidden(), None
        if hasattr(self, "coefs_"):
            layers = Layers(self.coefs_, self.intercepts_)
            if (sizes := tuple(map(len, layers.biases[:-1]))) != hidden:
                raise ValueError(f"hidden must stay {sizes} in a stream, got {hidden}; fit starts a new model")
            if (known := self._with_intercepts) != self.fit_intercept:
                raise ValueError(
                    f"fit_intercept must stay {known} in a stream, got {not known}; fit starts a new model"
                )
        with torch.inference_mode(False), torch.enable_grad():
            task = self._task(y, weights, X.dtype)
            if not hasattr(self, "_stream"):
                problem, random = self._problem(X, task, weights), check_random_state(self.random_state)
                self._stream = Stream(problem, weights.mean(), goal, hidden, layers, random)
            self._stream.aim_at(goal)
            try:
                objective = self._stream.learn(X, task, weights, self._batch_size(len(weights)))
            except BaseException:
                del self._stream  # it is somewhere in this part; the next part starts from the model before
                raise
        before = [] if layers is None else self.loss_curve_
        self.coefs_, self.intercepts_ = self._stream.layers()
        self._with_intercepts = bool(self.fit_intercept)
        self.loss_curve_ = [*before, objective]
        self.n_iter_ = len(self.loss_curve_)

    def _outputs(self, X: Any) -> Array:
        """Return the outputs of the model, of shape (samples, outputs)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=DTYPES, reset=False)
        found: Array = X
        for weight, bias in zip(self.coefs_, self.intercepts_, strict=True):
            read = found if found is X else np.maximum(found, 0)
            found = np.asarray(read @ weight.T) + bias
        return found

    def _linear_layer(self) -> tuple[Array, Array]:
        """Return the weight and the bias of a linear model; networks have no such attributes."""
        if "coefs_" not in vars(self) or len(self.coefs_) > 1:
            raise AttributeError("coef_ and intercept_ are those of a fitted linear model; networks have coefs_")
        return self.coefs_[0], self.intercepts_[0]

    @property
    def selected_(self) -> Array:
        """Which inputs the model uses, a mask."""
        check_is_fitted(self)
        selected: Array = np.any(self.coefs_[0] != 0, axis=0)
        return selected

    @property
    def sparsity_(self) -> float:
        """The share of weights that are exactly zero."""
        check_is_fitted(self)
        return 1 - sum(np.count_nonzero(w) for w in self.coefs_) / sum(w.size for w in self.coefs_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
