"""The benchmark of adaptive methods trains with every method, chooses lr, and resumes from its records."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks import adaptive
from benchmarks.adaptive_methods import METHODS, TARGETS, methods_for
from benchmarks.adaptive_model import Model, Point, warm_up_and_cosine
from benchmarks.adaptive_report import LOOKS, interpolated
from benchmarks.targets_methods import Job, Kind
from benchmarks.targets_tasks import TASKS, ByteTransformer, Folders, Task
from torch import nn

from proxmo import GroupL2, unit_groups

DIGITS = TASKS["digits"](Folders())


def small_task(steps: int = 100) -> Task:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))

    return replace(DIGITS, make=make, steps=steps, lr=0.02)


@pytest.mark.parametrize(("kind", "removed"), [("elements", 0.8), ("units", 0.75)])
def test_methods_with_a_target_remove_what_is_asked_for(kind: Kind, removed: float) -> None:
    for name in methods_for(kind):
        if not METHODS[name].strengths:
            (point,) = METHODS[name].train(Job(small_task(), kind, removed, seed=0))
            assert point.removed == pytest.approx(removed, abs=1e-3), name
            assert point.score > 0.5, name


@pytest.mark.parametrize(
    ("name", "strength"), [("prox-adamw", 3e-3), ("prox-lion", 1e-3), ("prox-sgd", 3e-3), ("naive", 0.3)]
)
def test_methods_with_a_strength_make_zeros(name: str, strength: float) -> None:
    lr = {"lion": 0.01, "sgd": 0.5}.get(METHODS[name].family, 0.02)
    points = [
        METHODS[name].train(Job(replace(small_task(), lr=lr), "elements", 0.0, seed=0, strength=s))[0]
        for s in (0.0, strength)
    ]
    assert points[0].removed == 0 < 0.1 < points[1].removed < 1
    assert min(point.score for point in points) > 0.5


def test_rows_are_those_of_hidden_layers() -> None:
    model = Model(Job(small_task(), "rows", 0.0, seed=0, strength=0.1))
    assert [p.shape for p in model.blocks.weights()] == [(24, 64)]
    assert next(group["penalty"].strength for group in model.groups if group["penalty"]) == pytest.approx(0.8)
    with torch.no_grad():
        model.blocks.weights()[0][:6] = 0
    assert model.blocks.left() == [(24, 18)]


def test_one_run_with_l1_in_the_loss_is_cut_to_all_targets() -> None:
    points = METHODS["l1-in-loss"].train(Job(small_task(), "elements", 0.0, seed=0, strength=1e-3))
    assert [point.removed for point in points] == pytest.approx(TARGETS["elements"], abs=1e-3)
    assert points[0].score > 0.5


def test_without_a_strength_all_adamw_are_one() -> None:
    job = Job(small_task(20), "elements", 0.0, seed=0, strength=0.0)
    (dense,) = METHODS["dense"].train(job)
    for name in ("prox-adamw", "naive"):
        (point,) = METHODS[name].train(job)
        assert point == dense, name


def test_largest_weights_and_units_are_kept() -> None:
    model = Model(Job(small_task(), "elements", 0.0, seed=0))
    before = torch.cat([p.detach().flatten() for p in model.blocks.weights()])
    model.blocks.keep_largest(0.25)
    after = torch.cat([p.detach().flatten() for p in model.blocks.weights()])
    kept = after != 0
    assert int(kept.sum()) == round(0.25 * len(kept))
    assert torch.equal(after[kept], before[kept])
    assert before[kept].abs().min() > before[~kept].abs().max()
    units = Model(Job(small_task(), "units", 0.0, seed=0))
    units.blocks.keep_largest(0.25)
    assert units.blocks.left() == [(24, 6)]


def test_lr_rises_and_falls_and_never_is_zero() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler = warm_up_and_cosine(optimizer, 40)
    lrs = []
    for _ in range(40):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert lrs[:3] == [0.5, 1.0, 1.0]
    assert all(before > after for before, after in pairwise(lrs[2:]))
    assert 0 < lrs[-1] < 0.01


def test_units_of_the_transformer_are_neurons_and_heads() -> None:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    groups = unit_groups(ByteTransformer(), tokens, GroupL2(0.1))
    names = {name for group in groups if group["penalty"] is not None for name, _ in group["params"]}
    for block in (0, 1):
        assert {f"blocks.{block}.inner.weight", f"blocks.{block}.attention.in_proj_weight"} <= names


def test_scores_are_interpolated_between_points_only() -> None:
    points = [Point(0.96, 0.7), Point(0.0, 0.9), Point(0.84, 0.8)]
    assert interpolated(points, 0.92) == pytest.approx(0.75)
    assert interpolated(points, 0.6) == pytest.approx(0.85)
    assert interpolated(points, 0.97) is None
    assert interpolated(points[::2], 0.5) is None
    assert interpolated(points[::2], 0.5, outside=True) == 0.8
    assert interpolated(points, 0.99, outside=True) == pytest.approx(0.6)


def test_every_method_has_a_look() -> None:
    assert list(LOOKS) == list(METHODS)


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adaptive.TASKS, "digits", lambda folders: small_task(30))
    monkeypatch.setitem(adaptive.LRS, "adam", (1e-3, 1e-2))
    monkeypatch.setitem(adaptive.STRENGTHS, "elements", (1e-3, 1e-2))


@pytest.mark.slow
@pytest.mark.usefixtures("small_grid")
def test_main_chooses_lr_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["dense", "trimmed", "gradual", "l1-in-loss"]
    arguments = ["--tasks", "digits", "--methods", *methods, "--seeds", "2", "--out", str(tmp_path)]
    adaptive.main(arguments)
    choices, runs = 2 * (1 + 2 * 2 + 1), 2 * (1 + 2 * (4 + 2) + 2)
    assert capsys.readouterr().out.count("min left") == choices + runs
    records = json.loads((tmp_path / "adaptive.json").read_text(encoding="utf-8"))
    assert len(records) == runs
    assert {record["lr"] for record in records} == {1e-2}
    table = (tmp_path / "adaptive.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[1:3] for line in table[2:]] == [
        *(["elements", f"{target:.0%}"] for target in TARGETS["elements"]),
        *(["units", f"{target:.0%}"] for target in TARGETS["units"]),
    ]
    assert (tmp_path / "adaptive.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "records" / "digits-units-trimmed-0.5-0.01-1.json").unlink()
    adaptive.main(arguments)
    assert "[1/1] digits, units, trimmed, 0.5, lr 0.01, seed 1: accuracy" in capsys.readouterr().out


def test_report_needs_records(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no records"):
        adaptive.main(["--tasks", "digits", "--report-only", "--out", str(tmp_path)])
