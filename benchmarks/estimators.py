"""Measure sparse classifiers beside those of others: `python -m benchmarks.estimators a9a.bz2 mushrooms.bz2`.

All solve ℓ1-penalised logistic regression with the same strength, a hundredth of the smallest one that leaves no input,
on files in LIBSVM format and on TF-IDF features of Python's sources (is a file part of the largest package?). Each is
given 1, 2, 4, … passes until its loss on the test half is within 1% of that of the exact solution; the time is the CPU
time of that last fit alone. LassoNet and proxmo's networks have another objective; they are listed with what they
reach.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_svmlight_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from benchmarks.output import made_with, write
from proxmo.experiments.threads import one_thread
from proxmo.sklearn import ProxClassifier

SHARE = 0.01  # of the strength that leaves no input
CLOSE = 1.01  # times the test loss of the exact solution
MAX_PASSES = 4096
MAX_SECONDS = 60.0
FILES, CHARACTERS, WORDS = 6000, 4000, 20_000  # of the sources
SMALL = 10_000  # samples for which networks are compared, too


class Data(NamedTuple):
    """Training and test halves, and the strength."""

    name: str
    X: Any
    y: np.ndarray
    X_test: Any
    y_test: np.ndarray
    strength: float


class Row(NamedTuple):
    """What a method reached."""

    data: str
    method: str
    passes: int | None
    cpu_seconds: float
    wall_seconds: float
    test_loss: float
    excess: float | None
    """The objective relative to that of the exact solution, minus 1; ``None`` for another objective."""
    inputs: int
    reached: bool


def halves(name: str, X: Any, y: np.ndarray) -> Data:
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
    strength = SHARE * ProxClassifier().path(X, y, strengths=1).strengths[0]
    return Data(name, X.tocsr(), y, X_test.tocsr(), y_test, float(strength))


def from_file(path: Path) -> Data:
    X, labels = load_svmlight_file(str(path))
    return halves(path.name.split(".")[0], X, (labels == labels.max()).astype(int))


def python_sources(folder: Path) -> Data:
    """Return TF-IDF features of source files below a folder; the name of the package is not a feature."""
    paths = sorted(folder.glob("*/**/*.py"))
    paths = [paths[k] for k in np.random.RandomState(0).permutation(len(paths))[:FILES]]
    packages = [path.relative_to(folder).parts[0] for path in paths]
    largest = Counter(packages).most_common(1)[0][0]
    texts = [path.read_text(encoding="utf-8", errors="ignore")[:CHARACTERS] for path in paths]
    words = TfidfVectorizer(max_features=WORDS, stop_words=[largest.lower()], sublinear_tf=True)
    return halves("sources", words.fit_transform(texts), np.array([p == largest for p in packages]).astype(int))


def methods(data: Data) -> dict[str, Callable[[int], Any]]:
    """Return functions from a number of passes to an estimator."""
    strength, samples = data.strength, len(data.y)
    same = {"l1_ratio": 1.0, "C": 1 / (strength * samples), "tol": 1e-12}
    found = {
        "ProxClassifier": lambda n: ProxClassifier(strength=strength, max_iter=n),
        "ProxClassifier, early stopping": lambda n: ProxClassifier(
            strength=strength, max_iter=n, early_stopping=True, random_state=0
        ),
        "LogisticRegression, saga": lambda n: LogisticRegression(solver="saga", max_iter=n, random_state=0, **same),
        "LogisticRegression, liblinear": lambda n: LogisticRegression(
            solver="liblinear", max_iter=n, intercept_scaling=100.0, random_state=0, **same
        ),
        "SGDClassifier": lambda n: SGDClassifier(
            loss="log_loss", penalty="l1", alpha=strength, max_iter=n, tol=None, random_state=0
        ),
    }
    if find_spec("skglm") is not None:
        from skglm import SparseLogisticRegression

        found["skglm"] = lambda n: SparseLogisticRegression(alpha=strength, max_iter=n, tol=1e-12)
        found["skglm"](1).fit(data.X[:200], data.y[:200])  # compiles
    return found


def timed(data: Data, make: Callable[[], Any]) -> tuple[Any, float, float]:
    model, cpu, wall = make(), time.process_time(), time.perf_counter()
    model.fit(data.X, data.y)
    return model, time.process_time() - cpu, time.perf_counter() - wall


def test_loss_of(model: Any, data: Data) -> float:
    return float(log_loss(data.y_test, model.predict_proba(data.X_test)[:, 1]))


def objective(model: Any, data: Data) -> float:
    scores = data.X @ np.ravel(model.coef_) + np.ravel(model.intercept_)
    return float(np.mean(np.logaddexp(0, scores) - data.y * scores) + data.strength * np.abs(model.coef_).sum())


def compare(data: Data) -> Iterator[Row]:
    """Yield a row for each method."""
    exact = ProxClassifier(strength=data.strength, tol=1e-9, max_iter=20_000).fit(data.X, data.y)
    best, target = objective(exact, data), CLOSE * test_loss_of(exact, data)
    yield Row(data.name, "exact solution", None, 0.0, 0.0, target / CLOSE, 0.0, int(exact.selected_.sum()), True)
    for name, make in methods(data).items():
        passes = 1
        while True:
            model, cpu, wall = timed(data, lambda make=make, passes=passes: make(passes))
            loss = test_loss_of(model, data)
            if loss <= target or passes >= MAX_PASSES or cpu > MAX_SECONDS:
                break
            passes *= 2
        inputs = int(np.count_nonzero(model.coef_))
        yield Row(data.name, name, passes, cpu, wall, loss, objective(model, data) / best - 1, inputs, loss <= target)
    if len(data.y) <= SMALL:
        yield from networks(data, keep=int(exact.selected_.sum()))


def networks(data: Data, keep: int) -> Iterator[Row]:
    """Yield rows of networks that use about as many inputs as the exact linear model."""
    model, cpu, wall = timed(data, lambda: ProxClassifier(keep=keep, hidden=(32,), max_iter=30, random_state=0))
    name = "ProxClassifier, hidden=(32,)"
    loss = test_loss_of(model, data)
    yield Row(data.name, name, 30, cpu, wall, loss, None, int(model.selected_.sum()), True)
    if find_spec("lassonet") is not None and data.X.shape[1] <= 1000:
        from lassonet import LassoNetClassifier

        dense = data._replace(X=data.X.toarray().astype(np.float32), X_test=data.X_test.toarray().astype(np.float32))
        net, cpu, wall = timed(dense, lambda: _Path(LassoNetClassifier(hidden_dims=(32,), random_state=0), keep))
        yield Row(data.name, "LassoNet, hidden (32,)", None, cpu, wall, test_loss_of(net, dense), None, net.used, True)


class _Path:
    """Fits LassoNet's path, and predicts with its first model that uses few enough inputs."""

    def __init__(self, model: Any, keep: int) -> None:
        self._model, self._keep, self.used = model, keep, 0

    def fit(self, X: Any, y: Any) -> None:
        for point in self._model.path(X, y, return_state_dicts=True):
            self.used = int(point.selected.sum())
            if self.used <= self._keep:
                self._model.load(point)
                return

    def predict_proba(self, X: Any) -> Any:
        return self._model.predict_proba(X)


def draw(rows: list[Row]) -> Figure:
    names = list(dict.fromkeys(row.data for row in rows))
    figure = Figure(figsize=(4 * len(names), 4), layout="constrained")
    for axes, name in zip(np.ravel(figure.subplots(1, len(names))), names, strict=True):
        shown = [row for row in rows if row.data == name and row.excess is not None and row.passes is not None]
        colours = ["#D55E00" if row.method.startswith("Prox") else "#999999" for row in shown]
        axes.barh([row.method for row in shown], [row.cpu_seconds for row in shown], color=colours)
        axes.set(xscale="log", xlabel="CPU seconds to a test loss within 1%", title=name)
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
    return figure


def cells(row: Row) -> tuple[str, ...]:
    passes = "" if row.passes is None else str(row.passes) if row.reached else f"{row.passes}, not reached"
    timed = row.method != "exact solution"
    return (
        row.data,
        row.method,
        passes,
        f"{row.cpu_seconds:.2f}" if timed else "",
        f"{row.wall_seconds:.2f}" if timed else "",
        f"{row.test_loss:.4f}",
        "" if row.excess is None else f"{row.excess:.1e}",
        str(row.inputs),
    )


COLUMNS = ("data", "method", "passes", "CPU s", "wall s", "test loss", "objective − 1", "inputs")


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="files in LIBSVM format with two classes")
    parser.add_argument(
        "--sources", type=Path, default=Path(sysconfig.get_paths()["purelib"]), help="folder with Python packages"
    )
    parser.add_argument("--out", type=Path, default=Path("results/estimators"))
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runs are meant to end early
        for data in [*map(from_file, options.files), python_sources(options.sources)]:
            for row in compare(data):
                print(*cells(row), sep="  ", flush=True)
                rows.append(row)
    numbers = {"made_with": made_with(), "rows": [row._asdict() for row in rows]}
    write(options.out, "estimators", numbers, draw(rows), COLUMNS, [cells(row) for row in rows])


if __name__ == "__main__":
    main()
