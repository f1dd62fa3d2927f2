"""Sparse regression."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_array
from sklearn.utils.metaestimators import available_if
from typing_extensions import Self

from proxmo.sklearn.base import ProxEstimator, takes_streams
from proxmo.sklearn.inputs import Array
from proxmo.sklearn.losses import REGRESSION, Loss, find_loss, losses_of_samples
from proxmo.sklearn.problem import Task


@torch.no_grad()
def _outputs_are_predictions(loss: Loss, y: Array, shares: Array) -> bool:
    """Whether a loss compares outputs with targets themselves, and not with their logarithm, for example.

    The mean of the targets is then a better output than 0.
    """
    targets, weights = torch.from_numpy(y), torch.from_numpy(shares)
    mean, zero = (weights @ targets).repeat(len(targets), 1), torch.zeros_like(targets)
    at_mean, at_zero = (float(losses_of_samples(loss, outputs, targets) @ weights) for outputs in (mean, zero))
    return at_mean <= at_zero


class ProxRegressor(RegressorMixin, ProxEstimator):  # type: ignore[misc]
    r"""A linear regression or a small network that selects its inputs.

    .. math::
        \min_{w, b}\; \frac{1}{\sum_i s_i} \sum_i s_i\,\ell(y_i, f(x_i; w, b)) + ψ(w)

    where s are the sample weights. Nothing is standardised, as in scikit-learn; columns are scaled internally, so badly
    scaled ones do no harm. A linear model is solved on all samples, by accelerated proximal gradient steps, to the
    accuracy ``tol``. Networks, streams (``partial_fit``) and early stopping use `AutoProxSGD` on mini-batches. Sparse
    matrices are never made dense, except for the columns that ``keep`` leaves in a linear model, if samples·columns² is
    at most 1e9.

    With the default loss this is the objective of ``Lasso(alpha=strength)``, for several targets of ``MultiTaskLasso``.

    Fitted attributes: ``coef_`` and ``intercept_`` (linear models), ``coefs_`` and ``intercepts_`` (of each layer,
    weights of shape (outputs, inputs)), ``selected_`` (a mask of the inputs in use), ``sparsity_`` (the share of zero
    weights), ``loss_curve_`` (the objective after each pass), ``n_iter_``, ``n_features_in_``,
    ``feature_names_in_``.

    Args:
        penalty: ``"inputs"``: strength·Σ_j ‖w_j‖₂, where w_j are the weights that read input j; with one output this is
            the lasso. ``"l1"``: strength·Σ|w|. A `Penalty` of proxmo applies to every weight matrix, of shape
            (outputs, inputs). ``None``: no penalty. Intercepts and biases are never penalised.
        strength: the strength of the penalty; by default 1e-3 for a named penalty, and its own for a `Penalty`.
        keep: in place of ``strength``, the share (a float) or the number (an integer) of inputs to keep, or of weights
            with ``penalty="l1"``, where each layer keeps the same share. What is kept is not shrunk, and the units of
            the inputs do not matter. There is no ``partial_fit`` with ``keep``.
        hidden: the size of a hidden layer with ReLU, or a sequence of sizes; ``()`` for a linear model.
        loss: ``"squared_error"``, (y − f)²/2, ``"huber"``, or a function of outputs and targets, both of shape
            (n, targets), that returns losses of samples and is smooth in the outputs. Losses of several targets are
            added.
        fit_intercept: whether the model has intercepts (biases).
        max_iter: the maximum number of passes over the samples; by default 10,000 for a linear model, and 100 epochs
            for a network or with early stopping.
        tol: a linear model stops when the estimated gap to the optimum is at most ``tol`` times the objective; with
            ``keep``, at most 1e-3 times suffices if ``tol`` takes many steps. With early stopping, the relative
            decrease of the validation loss that counts as an improvement.
        batch_size: samples per mini-batch; by default 1/32 of all samples, between 16 and 256.
        early_stopping: train on mini-batches, and stop when the loss on held-back samples no longer falls.
        validation_fraction: the share of samples to hold back, in (0, 1).
        n_iter_no_change: the number of epochs without improvement after which to stop.
        random_state: seed of the initial weights, the batches and the held-back samples. A linear model without early
            stopping is deterministic.
        verbose: 1 shows a progress line with loss, zeros and inputs in use; on a terminal only, quiet in logs.

    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.linear_model import Lasso
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model, lasso = ProxRegressor(strength=0.1).fit(X, y), Lasso(alpha=0.1, tol=1e-8).fit(X, y)
    >>> bool((abs(model.coef_ - lasso.coef_) < 1).all()), int(model.selected_.sum())
    (True, 7)
    """

    def __init__(
        self,
        penalty: Any = "inputs",
        *,
        strength: Any = None,
        keep: Any = None,
        hidden: Any = (),
        loss: Any = "squared_error",
        fit_intercept: Any = True,
        max_iter: Any = None,
        tol: Any = 1e-8,
        batch_size: Any = None,
        early_stopping: Any = False,
        validation_fraction: Any = 0.1,
        n_iter_no_change: Any = 10,
        random_state: Any = None,
        verbose: Any = 0,
    ) -> None:
        self.penalty = penalty
        self.strength = strength
        self.keep = keep
        self.hidden = hidden
        self.loss = loss
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.verbose = verbose

    def _validate(self, X: Any, y: Any, sample_weight: Any, reset: bool = True) -> tuple[Any, Array, Array]:
        X, y = self._validate_inputs(X, y, multi_output=True, y_numeric=True, reset=reset)
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")  # text passes the check above
        targets = y.reshape(len(y), -1)
        if reset:
            self._flat = y.ndim == 1
        elif targets.shape[1] != (known := len(self.intercepts_[-1])):
            raise ValueError(f"y must have as many targets as in the first call ({known}), got {targets.shape[1]}")
        return X, targets, self._weights(sample_weight, X)

    def _task(self, y: Array, weights: Array, dtype: Any) -> Task:
        loss, shares, none = find_loss(self.loss, REGRESSION), weights / weights.sum(), np.zeros(y.shape[1])
        center: Any = none
        for _ in range(2 if self.fit_intercept else 0):  # the second time corrects rounding: constants must not vary
            center = center + shares @ (y - center)
        spread = np.sqrt(shares @ np.square(y - center))
        spread = np.where(spread > 0, spread, 1.0)
        origin = none
        if not callable(self.loss):  # differences from the mean are exact where large targets are rounded
            y, center, origin = y - center, none, center
        elif not _outputs_are_predictions(loss, y.astype(dtype), shares.astype(dtype)):
            center, spread = none, np.ones_like(spread)
        targets, center, spread = (torch.from_numpy(np.array(a, dtype)) for a in (y, center, spread))
        return Task(targets, center, spread, loss, torch.from_numpy(origin))

    @available_if(takes_streams)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from a part of a stream, in one pass over it.

        Args:
            X: inputs.
            y: targets.
            sample_weight: how much each sample counts.
        """
        self._check_arguments()
        self._learn(*self._validate(X, y, sample_weight, reset=not hasattr(self, "coefs_")))
        return self

    @property
    def coef_(self) -> Array:
        """Coefficients of a linear model, of shape (features,), or (targets, features) if y had two axes."""
        weight = self._linear_layer()[0]
        return weight[0] if self._flat else weight

    @property
    def intercept_(self) -> Any:
        """The intercept of a linear model, a number, or one per target if y had two axes."""
        bias = self._linear_layer()[1]
        return bias[0] if self._flat else bias

    def predict(self, X: Any) -> Array:
        """Return the predicted targets."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._flat else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
