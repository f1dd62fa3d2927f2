"""Sparse classifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from typing_extensions import Self

from proxmo.sklearn.base import ProxEstimator, check_sum, takes_streams
from proxmo.sklearn.inputs import Array
from proxmo.sklearn.losses import CLASSIFICATION, find_loss
from proxmo.sklearn.problem import Task

LEAST = 1e-6  # the smallest share of a class that a model starts with


def _gives_probabilities(estimator: ProxClassifier) -> bool:
    if estimator.loss != "log_loss":
        raise AttributeError(f"probabilities need loss='log_loss', got {estimator.loss!r}")
    return True


def _at_least_two(name: str, values: Any) -> Array:
    """Return the classes among labels, sorted."""
    classes = np.unique(values)
    if len(classes) < 2:
        raise ValueError(f"{name} must have at least two classes, got one class: {classes.tolist()[0]!r}")
    return classes


class ProxClassifier(ClassifierMixin, ProxEstimator):  # type: ignore[misc]
    r"""A linear classifier or a small network that selects its inputs.

    .. math::
        \min_{w, b}\; \frac{1}{\sum_i s_i} \sum_i s_i\,\ell(y_i, f(x_i; w, b)) + ψ(w)

    where s are the sample weights. Nothing is standardised, as in scikit-learn; columns are scaled internally, so badly
    scaled ones do no harm. A linear model is solved on all samples, by accelerated proximal gradient steps, to the
    accuracy ``tol``. Networks, streams (``partial_fit``) and early stopping use `AutoProxSGD` on mini-batches. Sparse
    matrices are never made dense, except for the columns that ``keep`` leaves in a linear model, if samples·columns² is
    at most 1e9.

    Fitted attributes: ``coef_`` and ``intercept_`` (linear models), ``coefs_`` and ``intercepts_`` (of each layer,
    weights of shape (outputs, inputs)), ``selected_`` (a mask of the inputs in use), ``sparsity_`` (the share of zero
    weights), ``loss_curve_`` (the objective after each pass), ``n_iter_``, ``n_features_in_``,
    ``feature_names_in_`` and ``classes_``.

    Args:
        penalty: ``"inputs"``: strength·Σ_j ‖w_j‖₂, where w_j are the weights that read input j; with one output this is
            the lasso. ``"l1"``: strength·Σ|w|. A `Penalty` of proxmo applies to every weight matrix, of shape
            (outputs, inputs). ``None``: no penalty. Intercepts and biases are never penalised.
        strength: the strength of the penalty; by default 1e-3 for a named penalty, and its own for a `Penalty`.
        keep: in place of ``strength``, the share (a float) or the number (an integer) of inputs to keep, or of weights
            with ``penalty="l1"``, where each layer keeps the same share. What is kept is not shrunk, and the units of
            the inputs do not matter. There is no ``partial_fit`` with ``keep``.
        hidden: the size of a hidden layer with ReLU, or a sequence of sizes; ``()`` for a linear model.
        loss: ``"log_loss"``, ``"squared_hinge"``, or a function of outputs and targets that returns losses of samples
            and is smooth in the outputs. Two classes have one output, of shape (n, 1), and targets 0 and 1 of that
            shape; more have an output each and class indices.
        class_weight: ``"balanced"`` or a dictionary from classes to factors on the weights of samples.
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

    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = make_pipeline(StandardScaler(), ProxClassifier(strength=0.02)).fit(X, y)
    >>> bool(model[-1].selected_.sum() < 15), bool(model.score(X, y) > 0.95)
    (True, True)
    """

    classes_: Array

    def __init__(
        self,
        penalty: Any = "inputs",
        *,
        strength: Any = None,
        keep: Any = None,
        hidden: Any = (),
        loss: Any = "log_loss",
        class_weight: Any = None,
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
        self.class_weight = class_weight
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.verbose = verbose

    def _validate(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Array, Array]:
        X, y = self._validate_inputs(X, y)
        check_classification_targets(y)
        self.classes_ = _at_least_two("y", y)
        return self._encode(X, y, sample_weight)

    def _encode(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Array, Array]:
        """Return inputs, indices of classes, and weights of samples times those of their classes."""
        indices, weights = np.searchsorted(self.classes_, y), self._weights(sample_weight, X)
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            sums = np.bincount(indices, weights, minlength=len(self.classes_))
            factors = np.divide(sums.sum() / len(sums), sums, out=np.zeros_like(sums), where=sums > 0)
        else:
            factors = compute_class_weight(self.class_weight, classes=self.classes_, y=self.classes_)
        if not (np.isfinite(factors) & (factors >= 0)).all():
            raise ValueError(f"class_weight must be finite and not negative, got {self.class_weight!r}")
        weights = weights * factors[indices]
        check_sum(weights, "all samples")
        return X, indices, weights

    def _task(self, y: Array, weights: Array, dtype: Any) -> Task:
        loss, classes = find_loss(self.loss, CLASSIFICATION), len(self.classes_)
        logits = np.log(np.maximum(np.bincount(y, weights, minlength=classes) / weights.sum(), LEAST))
        if classes == 2:
            center, targets = logits[1:] - logits[:1], torch.from_numpy(y[:, None].astype(dtype))
        else:
            center, targets = logits - logits.mean(), torch.from_numpy(y)
        center = torch.from_numpy(center.astype(dtype)) * float(self.loss == "log_loss")
        origin = torch.zeros_like(center, dtype=torch.float64)
        return Task(targets, center, torch.ones_like(center), loss, origin)

    def _strata(self, y: Array) -> Array:
        return y

    @available_if(takes_streams)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn from a part of a stream, in one pass over it.

        Args:
            X: inputs.
            y: targets.
            classes: all classes that will appear; needed in the first call.
            sample_weight: how much each sample counts.
        """
        self._check_arguments()
        first = not hasattr(self, "coefs_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        if isinstance(self.class_weight, str):
            raise ValueError(f"class_weight={self.class_weight!r} needs all samples; give sample_weight to partial_fit")
        X, y = self._validate_inputs(X, y, reset=first)
        check_classification_targets(y)
        given = self.classes_ if classes is None else _at_least_two("classes", classes)
        if not first and not np.array_equal(given, self.classes_):
            raise ValueError(f"classes must be those of the first call, {self.classes_.tolist()}, got {given.tolist()}")
        if unknown := sorted(set(np.unique(y).tolist()) - set(given.tolist())):
            raise ValueError(f"y must hold classes among {given.tolist()}, got {unknown}")
        self.classes_ = given
        self._learn(*self._encode(X, y, sample_weight))
        return self

    @property
    def coef_(self) -> Array:
        """Coefficients of a linear model: of shape (1, features) for two classes, else (classes, features)."""
        return self._linear_layer()[0]

    @property
    def intercept_(self) -> Array:
        """Intercepts of a linear model: one for two classes, else one per class."""
        return self._linear_layer()[1]

    def decision_function(self, X: Any) -> Array:
        """Return the outputs of the model: one per sample for two classes, else one per class."""
        outputs = self._outputs(X)
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    def predict(self, X: Any) -> Array:
        """Return the most likely class of each sample."""
        scores = self.decision_function(X)
        found: Array = self.classes_[scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)]
        return found

    @available_if(_gives_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class."""
        scores = self.decision_function(X)
        found: Array = softmax(scores, axis=1) if scores.ndim == 2 else np.stack([expit(-scores), expit(scores)], 1)
        return found

    @available_if(_gives_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probability of each class."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([log_expit(-scores), log_expit(scores)], 1)
        found: Array = log_softmax(scores, axis=1)
        return found
