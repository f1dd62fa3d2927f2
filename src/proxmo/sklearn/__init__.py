"""Estimators for scikit-learn: sparse linear models and small networks that select their inputs (extra `sklearn`).

>>> from sklearn.datasets import load_diabetes
>>> X, y = load_diabetes(return_X_y=True)
>>> model = ProxRegressor(keep=3).fit(X, y)
>>> int(model.selected_.sum())
3
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("proxmo.sklearn needs scikit-learn: pip install 'proxmo[sklearn]'") from error

from proxmo.sklearn.classifier import ProxClassifier
from proxmo.sklearn.cross_validation import ProxClassifierCV, ProxRegressorCV
from proxmo.sklearn.path import RegularizationPath
from proxmo.sklearn.regressor import ProxRegressor

__all__ = ["ProxClassifier", "ProxClassifierCV", "ProxRegressor", "ProxRegressorCV", "RegularizationPath"]
