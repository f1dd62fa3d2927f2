"""The comparison of methods: batched runs equal single runs, gradients are counted, losses match their formulas."""

from __future__ import annotations

import bz2
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import methods
from benchmarks.datasets import Dataset, embedded, from_file
from benchmarks.objectives import (
    NonconvexLogistic,
    Objective,
    RobustRows,
    TwoLayers,
    full_gradients,
    gradients,
    mapping_norms,
)
from benchmarks.solvers import SOLVERS, Solver, edges
from torch import Tensor

each_objective = pytest.mark.parametrize(
    "objective", [NonconvexLogistic(), RobustRows(), TwoLayers()], ids=lambda o: o.name
)
each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.name)


def small() -> Dataset:
    whole = embedded("digits")
    return Dataset("small", whole.inputs[:80], whole.classes[:80])


def one_loss(objective: Objective, point: list[Tensor], a: Tensor, label: int) -> float:
    """Return the loss on one sample, computed with scalars and loops."""
    if isinstance(objective, NonconvexLogistic):
        t = float(a @ point[0]) * (1 if label > 0 else -1)
        return math.log1p(math.exp(-t)) - math.log1p(math.exp(-t - 1))
    if isinstance(objective, RobustRows):
        residuals = [float(a @ point[0][:, c]) - (c == label) for c in range(point[0].shape[1])]
        return sum(r * r / (1 + r * r) / 2 for r in residuals)
    scores = [float(torch.tanh(point[0] @ a) @ row) for row in point[1]]
    return math.log(sum(map(math.exp, scores))) - scores[label]


@each_objective
def test_losses_and_gradients_equal_scalar_reference(objective: Objective) -> None:
    data = small()
    start = objective.start(data, range(2))
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(3, *x.shape, generator=generator, dtype=torch.float64) for x in start]
    rows = torch.randint(80, (2, 5), generator=generator)
    losses = objective.losses(points, data.inputs[rows], data.classes[rows])
    assert losses.shape == (3, 2, 5)
    for g, s, b in ((0, 0, 0), (2, 1, 4), (1, 0, 3)):
        row = int(rows[s, b])
        expected = one_loss(objective, [p[g, s] for p in points], data.inputs[row], int(data.classes[row]))
        assert float(losses[g, s, b]) == pytest.approx(expected, rel=1e-10)
    # check the gradient of one run by central differences
    found = gradients(objective, points, data.inputs[rows], data.classes[rows])
    step = 1e-6
    for layer, place in enumerate(points):
        index = (2, 1, *[1] * (place.dim() - 2))
        values = []
        for sign in (1, -1):
            moved = [p.clone() for p in points]
            moved[layer][index] += sign * step
            values.append(float(objective.losses(moved, data.inputs[rows], data.classes[rows])[2, 1].mean()))
        assert float(found[layer][index]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8)


@each_objective
def test_full_gradients_do_not_depend_on_chunk_size(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small()
    points = [torch.stack([x, 2 * x + 0.1]) for x in objective.start(data, range(3))]
    whole = full_gradients(objective, points, data)
    norms = mapping_norms(objective, points, data)
    monkeypatch.setattr("benchmarks.objectives.CHUNK", 3000)
    torch.testing.assert_close(full_gradients(objective, points, data), whole)
    assert norms.shape == (2, 3)
    assert (norms > 0).all()
    points[0][0, 0].fill_(math.nan)
    assert mapping_norms(objective, points, data)[0, 0] == math.inf


@each_solver
def test_batched_runs_equal_single_runs(solver: Solver) -> None:
    data, objective = small(), RobustRows()
    settings = [s for s in solver.grid(data.size) if s.lr <= 1]
    settings = [s for s in settings if (s.batch, s.period) == (settings[0].batch, settings[0].period)]
    assert len(settings) > 1
    batched = methods.run(solver, settings, objective, data, range(2), [100, 400])
    for setting, errors in zip(settings, batched, strict=True):
        single = methods.run(solver, [setting], objective, data, range(2), [100, 400])[0]
        np.testing.assert_allclose(errors, single, rtol=1e-9)


def test_cost_predicts_evaluated_gradients() -> None:
    """Count four steps; two-point methods start with one point, hybrid SGD with a large batch, SpiderBoost with all."""
    data, objective = small(), NonconvexLogistic()
    expected = {
        "vanilla": 4 * 16,
        "momentum": 4 * 16,
        "STORM": 7 * 16,
        "hybrid SGD": (16 + 3 * 3) * 16,
        "SpiderBoost": 80 + 3 * 2 * 16,
    }
    for solver in SOLVERS:
        points = [x[None] for x in objective.start(data, range(1))]
        params = [[torch.nn.Parameter(p[0]) for p in points]]
        optimizer = solver.optimizer([{"params": params[0]}], objective.penalty)
        oracle = methods.Oracle(objective, data, points, params, seed=0)
        for _ in range(4):
            predicted = oracle.evaluated + solver.cost(optimizer, 16, data.size)
            solver.step(optimizer, 16, oracle)
            assert oracle.evaluated == predicted
        assert oracle.evaluated == expected[solver.name]


def test_all_grids_have_the_same_size() -> None:
    for size in (569, 8124, 32561):
        assert {len(set(solver.grid(size))) for solver in SOLVERS} == {42}


def test_edges_names_quantities_at_the_ends_of_the_grid() -> None:
    grid = SOLVERS[1].grid(1000)
    middle = next(s for s in grid if (s.lr, s.momentum) == (1.0, 0.9))
    assert edges(middle, grid) == []  # with two batch sizes, either would be at an edge
    assert edges(grid[0], grid) == ["lr", "momentum"]


def test_from_file_reads_libsvm_format(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt.bz2"
    path.write_bytes(bz2.compress(b"1 1:3 2:4\n2 3:1\n2 1:1\n"))
    data = from_file(path)
    assert data.name == "tiny"
    torch.testing.assert_close(data.inputs, torch.tensor([[0.6, 0.8, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.float64))
    assert data.classes.tolist() == [0, 1, 1]


def test_main_writes_figure_table_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(methods, "embedded", lambda _: small())
    monkeypatch.setattr(methods, "SOLVERS", SOLVERS[:2])
    methods.main(["--passes", "2", "--seeds", "2", "--out", str(tmp_path / "deep" / "er")])
    written = json.loads((tmp_path / "deep" / "er" / "methods.json").read_text())
    assert [result["method"] for result in written] == ["vanilla", "momentum"] * 3
    for result in written:
        if "network" not in result["problem"]:  # 160 gradients are too few to train it
            assert result["median"][-1] < result["median"][0]
        assert result["gradients"][-1] == 160
    assert (tmp_path / "deep" / "er" / "methods.png").stat().st_size > 10_000
    table = (tmp_path / "deep" / "er" / "methods.md").read_text().splitlines()
    assert len(table) == 2 + 6
    assert table[3].split("|")[2].strip() == "momentum"
    assert table[3].split("|")[6].strip() == "1"
    assert "momentum" in capsys.readouterr().out
