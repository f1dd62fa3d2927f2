"""Estimators for scikit-learn."""

from proxmo.sklearn.classifier import ProxClassifier
from proxmo.sklearn.path import RegularizationPath
from proxmo.sklearn.regressor import ProxRegressor

__all__ = ["ProxClassifier", "ProxRegressor", "RegularizationPath"]
