"""Grids divided among machines: shares, other seeds and jobs of a cluster give the report of one local run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.cluster_jobs import has_slurm
from experiments.few_images import few_images, loader
from proxmo.experiments import cluster, comparison, pool, synthetic
from proxmo.experiments.commands import app
from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job
from proxmo.experiments.presets import Grid, Presets, Size
from proxmo.experiments.regularized import Regularized
from proxmo.experiments.store import Store

SIZE = Size(8, Grid((48, 32), rates=(0.1,), momenta=(0.0, 0.9), epochs=1, annealed=0.1), seeds=2, repeat_all=True)


def one_after_another(
    jobs: list[Job], load: Callable[[], Images], device: str, store: Store, advance: Callable[[int], None]
) -> None:
    """Stand in for `run_jobs`: in this process, since workers take seconds to start."""
    for job in jobs:
        pool._train(job, load(), device, store, advance)


@pytest.fixture(autouse=True, scope="module")
def tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Regularized, "sizes", Presets(SIZE, SIZE, SIZE, SIZE))
        patch.setattr(comparison, "load", loader(few_images(train=96, test=50)))
        patch.setattr(comparison, "run_jobs", one_after_another)
        patch.setattr(synthetic, "ITERATIONS", 50)
        patch.setattr(synthetic, "AUTO_SEEDS", 1)
        yield


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join((done.output + done.stderr).split())


def reproduce(out: Path, *arguments: str) -> str:
    code, output = run("reproduce", "regularized", "--quiet", "--out", str(out), *arguments)
    assert code == 0, output
    return output


def numbers(folder: Path) -> Any:
    """Return the results without the seconds that runs took."""
    found = json.loads((folder / "results.json").read_text())
    for record in found["regularized"]["runs"]:
        del record["seconds"]
    return found


@pytest.fixture(scope="module")
def whole(tiny: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one local run, which tests only read."""
    folder = tmp_path_factory.mktemp("local") / "whole"
    reproduce(folder)
    return folder


def test_shares_of_a_grid_give_the_report_of_one_run(tmp_path: Path, whole: Path) -> None:
    shares = [tmp_path / f"share{i}" for i in (1, 2)]
    for i, share in enumerate(shares, start=1):
        output = reproduce(share, "--only", f"{i}/2")
        assert "put the folders of all shares together" in output
        assert not (share / "report.html").exists()
    code, output = run("report", str(shares[0]), "--out", str(tmp_path / "merged"))
    assert code == 1
    assert "2 of 5 runs of the grid are in no folder, such as regularized-batch" in output
    assert not (tmp_path / "merged").exists()
    assert run("report", *map(str, shares), "--out", str(tmp_path / "merged"))[0] == 0
    assert len(numbers(tmp_path / "merged")["regularized"]["runs"]) == 5
    reproduce(tmp_path / "merged", "--resume")  # the second seeds, which depend on the whole grid
    assert numbers(tmp_path / "merged") == numbers(whole)
    assert (tmp_path / "merged" / "report.html").read_bytes() == (whole / "report.html").read_bytes()


def test_other_seeds_are_merged_and_other_settings_refused(tmp_path: Path, whole: Path) -> None:
    other, stronger = tmp_path / "other", tmp_path / "stronger"
    reproduce(other, "--first-seed", "5")
    assert run("report", str(whole), str(other), "--out", str(tmp_path / "merged"))[0] == 0
    found = numbers(tmp_path / "merged")
    assert len(found["regularized"]["runs"]) == 2 * len(numbers(whole)["regularized"]["runs"])
    assert {record["setting"]["seed"] for record in found["regularized"]["runs"]} == {0, 1, 5, 6}
    settings = found["settings"]["regularized"]
    assert (settings["seeds"], settings["first_seed"]) == (4, 0)
    assert settings["command"].endswith("--first-seed 5")
    reproduce(stronger, "--strength", "0.5")
    code, output = run("report", str(whole), str(stronger), "--out", str(tmp_path / "refused"))
    assert code == 1
    assert "do not belong together: strength is 0.1 and 0.5" in output
    (tmp_path / "empty").mkdir()
    assert "has no results of" in run("report", str(tmp_path / "empty"))[1]
    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    record = next(iter((other / "runs").glob("*seed5*.json")))
    record.write_text(record.read_text().replace('"train_loss": ', '"train_loss": 1'))
    assert "differs from the one in another folder" in run("report", str(other), str(copy))[1]


def test_cluster_gives_the_report_of_a_local_run(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Slurm if there is one, else by processes of this machine."""
    tests = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(cluster, "SECONDS_BETWEEN_CHECKS", 0.2)
    if not has_slurm():
        monkeypatch.setattr(shutil, "which", lambda name: None)
    out = tmp_path / "cluster"
    shutil.copytree(whole, out)  # all but one run are there already, as after an interruption
    for name in ("runs/regularized-all.json", "report.html", "results.json"):
        (out / name).unlink()
    next(iter((out / "runs").glob("*batch48*momentum0.9-seed1*.json"))).unlink()
    reproduce(out, "--cluster", "--resume")
    assert list((out / "cluster").glob("*_log.out"))
    assert numbers(out) == numbers(whole)
    assert (out / "report.html").read_bytes() == (whole / "report.html").read_bytes()


def test_quadratic_is_the_first_job(tmp_path: Path) -> None:
    arguments = ("reproduce", "synthetic", "--seeds", "2", "--quiet", "--out")
    for i in (1, 2):
        assert run(*arguments, str(tmp_path / str(i)), "--only", f"{i}/2")[0] == 0
    assert (tmp_path / "1" / "report.html").exists()
    assert not (tmp_path / "2" / "report.html").exists()
    assert run(*arguments, str(tmp_path / "3"), "--first-seed", "9")[0] == 0
    code, output = run("report", str(tmp_path / "1"), str(tmp_path / "3"), "--out", str(tmp_path / "refused"))
    assert code == 1
    assert "means over different seeds cannot be merged" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "3/2"), "must be I/N with 1 <= I <= N, got '3/2'"),
        (("--only", "half"), "must be I/N with 1 <= I <= N, got 'half'"),
        (("--cluster-options", "time=5"), "is for --cluster only"),
        (("--cluster", "--cluster-options", "time"), "must be key=value,key=value, got 'time'"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, output = run("reproduce", "--out", str(tmp_path / "out"), *arguments)
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()
