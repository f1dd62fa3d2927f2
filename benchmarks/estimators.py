"""Measure sparse classifiers beside those of others: `python -m benchmarks.estimators a9a.bz2 mushrooms.bz2`.

All solve ℓ1-penalised logistic regression with the same strength, a hundredth of the smallest one that leaves no input,
on files in LIBSVM format and on TF-IDF features of Python's sources (is a file part of the largest package?). Each is
given 1, 2, 4, … passes until its loss on the test half is within 1% of that of the exact solution; the time is the CPU
time of that last fit alone. A method that is not there after a fit of 10 seconds is listed as such. Coordinate descent
is there twice, as liblinear and as skglm, whose compilation is not timed.

Networks have another objective and are listed with what they reach with as many inputs as the exact linear model.
LassoNet trains in batches of 1024, for 30 epochs and then 5 at each point of a path in steps of 30%, for a minute of
CPU time at most: with its defaults (full batches, up to 1000 and 100 epochs, 2%) the path takes far longer. Another 30
epochs, in batches of 128, train a network on the inputs that are left. It needs dense data, so it is left out where
there are more than 1000 columns.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.special import expit
from sklearn.datasets import load_svmlight_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from benchmarks.l1_logistic import l1_logistic_regression
from benchmarks.output import GREY, ORANGE, made_with, write
from proxmo.experiments.threads import one_thread
from proxmo.sklearn import ProxClassifier

SHARE = 0.01  # of the strength that leaves no input
CLOSE = 1.01  # times the test loss of the exact solution
MAX_PASSES = 1024
MAX_SECONDS = 10.0  # of one fit
PATH_SECONDS, PATH_STEP = 60.0, 1.3  # of LassoNet
FILES, CHARACTERS, WORDS = 6000, 4000, 20_000  # of the sources
DENSE = 1000  # columns that LassoNet is given at most


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
    logistic = partial(l1_logistic_regression, strength, samples, tol=1e-12, random_state=0)
    found = {
        "ProxClassifier": lambda n: ProxClassifier(strength=strength, max_iter=n),
        "ProxClassifier, early stopping": lambda n: ProxClassifier(
            strength=strength, max_iter=n, early_stopping=True, random_state=0
        ),
        "LogisticRegression, saga": lambda n: logistic(solver="saga", max_iter=n),
        "LogisticRegression, liblinear": lambda n: logistic(solver="liblinear", max_iter=n, intercept_scaling=100.0),
        "SGDClassifier": lambda n: SGDClassifier(
            loss="log_loss", penalty="l1", alpha=strength, max_iter=n, tol=None, random_state=0
        ),
    }
    if find_spec("skglm") is not None:
        from skglm import SparseLogisticRegression

        found["skglm"] = lambda n: SparseLogisticRegression(alpha=strength, max_iter=n, tol=1e-12)
        found["skglm"](50).fit(data.X[:500], data.y[:500])  # compiles all that the timed fits call
    return found


def timed(data: Data, make: Callable[[], Any]) -> tuple[Any, float, float]:
    model, cpu, wall = make(), time.process_time(), time.perf_counter()
    model.fit(data.X, data.y)
    return model, time.process_time() - cpu, time.perf_counter() - wall


def test_loss_of(model: Any, data: Data) -> float:
    if hasattr(model, "coef_"):  # skglm's probabilities are those of twice the score
        chances = expit(data.X_test @ np.ravel(model.coef_) + np.ravel(model.intercept_))
    else:
        chances = model.predict_proba(data.X_test)[:, 1]
    return float(log_loss(data.y_test, chances))


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
    yield from networks(data, keep=int(exact.selected_.sum()))


def networks(data: Data, keep: int) -> Iterator[Row]:
    """Yield rows of networks that use about as many inputs as the exact linear model."""
    model, cpu, wall = timed(data, lambda: ProxClassifier(keep=keep, hidden=(32,), max_iter=30, random_state=0))
    name = "ProxClassifier, hidden=(32,)"
    loss = test_loss_of(model, data)
    yield Row(data.name, name, 30, cpu, wall, loss, None, int(model.selected_.sum()), True)
    if find_spec("lassonet") is not None and data.X.shape[1] <= DENSE:
        dense = data._replace(X=data.X.toarray().astype(np.float32), X_test=data.X_test.toarray().astype(np.float32))
        net, cpu, wall = timed(dense, lambda: LassoNetPath(keep))
        loss, name = test_loss_of(net, dense), "LassoNet, hidden_dims=(32,)"
        yield Row(data.name, name, net.points, cpu, wall, loss, None, net.used, net.used <= keep)


class LassoNetPath:
    """Fits LassoNet's path until few enough inputs are left or the time is up, and trains on these inputs again."""

    def __init__(self, keep: int) -> None:
        self._keep, self.points, self._end = keep, 0, 0.0
        self._selected, self._final = np.zeros(0, dtype=bool), self._network(batch_size=128)

    @property
    def used(self) -> int:
        """The number of inputs that are left."""
        return int(self._selected.sum())

    def _network(self, batch_size: int) -> Any:
        from lassonet import LassoNetClassifier

        path = {"path_multiplier": PATH_STEP, "n_iters": (30, 5), "batch_size": batch_size}
        return LassoNetClassifier(hidden_dims=(32,), random_state=0, torch_seed=0, verbose=0, **path)

    def fit(self, X: Any, y: Any) -> None:
        self._end = time.process_time() + PATH_SECONDS
        with suppress(StopIteration):
            self._network(batch_size=1024).path(X, y, callback=self._stop)
        self._final.path(X[:, self._selected], y, lambda_seq=[])  # without a penalty: weights on the path are shrunk

    def _stop(self, network: Any, points: list[Any]) -> None:
        """End the path where it is; LassoNet calls this after each model."""
        self._selected, self.points = network.model.input_mask().numpy(), len(points)
        if self.used <= self._keep or time.process_time() > self._end:
            raise StopIteration

    def predict_proba(self, X: Any) -> Any:
        return self._final.predict_proba(X[:, self._selected])


def draw(rows: list[Row]) -> Figure:
    """Draw the times of the methods that solve the same problem, one panel per data set."""
    names = list(dict.fromkeys(row.data for row in rows))
    figure = Figure(figsize=(6.4, 2.3 * len(names) + 0.4), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        shown = [row for row in rows if row.data == name and row.excess is not None and row.passes is not None]
        colours = [ORANGE if row.method.startswith("Prox") else GREY for row in shown]
        drawn = axes.barh([row.method for row in shown], [row.cpu_seconds for row in shown], color=colours)
        labels = [
            f"{row.cpu_seconds:.2g} s" if row.reached else f"{row.cpu_seconds:.2g} s, not reached" for row in shown
        ]
        axes.bar_label(drawn, labels, padding=3, fontsize=9)
        axes.set_xscale("log")
        axes.set_title(name, loc="left", fontsize=10)
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("CPU seconds to within 1% of the exact test loss")
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
