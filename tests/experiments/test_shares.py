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
from proxmo.experiments import cluster, commands, comparison, pool, reproduction, synthetic
from proxmo.experiments.commands import app
from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job
from proxmo.experiments.presets import Grid, Presets, Size
from proxmo.experiments.regularized import Regularized
from proxmo.experiments.store import Store, StoreError

SIZE = Size(8, Grid((48, 32), rates=(0.1,), momenta=(0.0, 0.9), epochs=1, annealed=0.1, repeat_all=True), seeds=2)


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
        assert f"missing runs: {1 + i}, such as regularized-batch" in output
        assert "put the folders of all shares together" in output
        assert not (share / "report.html").exists()
    code, output = run("report", str(shares[0]), "--out", str(tmp_path / "merged"))
    assert code == 1
    assert "2 of 5 runs of the grid are in no folder, such as regularized-batch" in output
    assert not (tmp_path / "merged").exists()
    code, output = run("report", *map(str, shares), "--out", str(tmp_path / "the whole"))
    assert code == 0
    assert f"--resume --out '{tmp_path / 'the whole'}'" in output
    (tmp_path / "the whole").rename(tmp_path / "merged")
    assert "missing runs: 4, such as regularized-batch" in output  # the second seeds, which depend on the whole grid
    assert "train them with: proxmo reproduce regularized --preset quick --data digits --resume --out " in output
    assert "Missing runs with further seeds: 4." in (tmp_path / "merged" / "report.html").read_text()
    assert len(numbers(tmp_path / "merged")["regularized"]["runs"]) == 5
    assert "missing" not in reproduce(tmp_path / "merged", "--resume")
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
    assert settings["seeds"] == ["0-1", "5-6"]
    assert settings["command"].endswith("--first-seed 5")
    reproduce(stronger, "--strength", "0.5", "--only", "1/5")
    code, output = run("report", str(whole), str(stronger), "--out", str(tmp_path / "refused"))
    assert code == 1
    assert "do not belong together: strength is 0.1 and 0.5" in output
    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    record = next(iter((other / "runs").glob("*seed5*.json")))
    record.write_text(record.read_text().replace('"train_loss": ', '"train_loss": 1'))
    output = run("report", str(other), str(copy), "--out", str(tmp_path / "refused"))[1]
    assert f"differs between {other} and {copy}: leave one of them out" in output
    assert not (tmp_path / "refused").exists()


def test_merged_folders_are_merged_again(tmp_path: Path, whole: Path) -> None:
    """Their seeds have gaps; what is missing is found for each range of seeds."""
    later, last, more = tmp_path / "later", tmp_path / "last", tmp_path / "more"
    reproduce(later, "--first-seed", "5", "--seeds", "1")
    assert run("report", str(whole), str(later), "--out", str(tmp_path / "merged"))[0] == 0
    reproduce(last, "--first-seed", "2", "--seeds", "1")
    code, output = run("report", str(tmp_path / "merged"), str(last), "--out", str(tmp_path / "all"))
    assert (code, "missing" in output) == (0, False)
    found = numbers(tmp_path / "all")
    assert found["settings"]["regularized"]["seeds"] == ["0-1", "2", "5"]
    assert len(found["regularized"]["runs"]) == len(numbers(whole)["regularized"]["runs"]) + 2 * 5
    next(iter((tmp_path / "all" / "runs").glob("*-seed1-*.json"))).unlink()
    output = run("report", str(tmp_path / "all"), "--out", str(tmp_path / "unfinished"))[1]
    assert "missing runs: 1, such as regularized-batch" in output
    assert "train them in the folders of their seeds, then merge again" in output
    reproduce(more, "--seeds", "3", "--only", "1/5")
    code, output = run("report", str(whole), str(more), "--out", str(tmp_path / "refused"))
    assert "was started for the seeds 0-1 and for 0-2; merge only one of them" in output


def test_folders_that_cannot_be_merged_are_named(tmp_path: Path, whole: Path) -> None:
    empty, copy = tmp_path / "empty", tmp_path / "copy"
    empty.mkdir()
    assert f"{tmp_path / 'nowhere'} is not a folder" in run("report", str(tmp_path / "nowhere"))[1]
    assert "has no results of" in run("report", str(empty))[1]
    assert f"{whole} exists already; choose another --out" in run("report", str(whole), "--out", str(whole))[1]
    shutil.copytree(whole, copy)
    settings = json.loads((copy / "runs" / "regularized-settings.json").read_text())
    damaged = [{**settings, "seeds": seeds} for seeds in (2, [], ["5-3"], ["x"])]
    cases = [("[1]", "is damaged"), ('{"seeds": ["0-1"]}', "are damaged or of another version")]
    for content, why in cases + [(json.dumps(one), "are damaged or of another version") for one in damaged]:
        (copy / "runs" / "regularized-settings.json").write_text(content)
        code, output = run("report", str(copy), "--out", str(tmp_path / "out"))
        assert code == 1
        assert why in output
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["copy", "empty"]


def test_merge_that_is_killed_leaves_no_folder(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            reproduction.merge([whole], tmp_path / "out")
    assert not list(tmp_path.iterdir())
    reproduction.merge([whole], tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_bytes() == (whole / "report.html").read_bytes()


def test_runs_that_nobody_asked_for_are_left_out(tmp_path: Path, whole: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    record = json.loads(next((copy / "runs").glob("regularized-batch*-seed0-*.json")).read_text())
    record["setting"]["seed"] = 7
    for loss in (1.0, 2.0):  # that they differ does not matter, either
        record["epochs"][-1]["train_loss"] = loss
        (copy / "runs" / f"regularized-batch9-stray{loss}.json").write_text(json.dumps(record))
    assert run("report", str(copy), "--out", str(tmp_path / "out"))[0] == 0
    assert numbers(tmp_path / "out") == numbers(whole)


def test_results_count_only_where_they_are(tmp_path: Path) -> None:
    """The second share has settings of the quadratic, but it is the first that computes it."""
    for i in (1, 2):
        code, _ = run("reproduce", "synthetic", "--seeds", str(1 + i), "--only", f"{i}/2", "--quiet", "--out",
                      str(tmp_path / str(i)))  # fmt: skip
        assert code == 0
    outcome = reproduction.merge([tmp_path / "1", tmp_path / "2"], tmp_path / "both")
    assert outcome.report == tmp_path / "both" / "report.html"
    assert Store(tmp_path / "both").settings("synthetic", lambda settings: settings["seeds"]) == ["0-1"]
    with pytest.raises(StoreError, match="but no folder has a result"):
        reproduction.merge([tmp_path / "2"], tmp_path / "refused")
    damaged = tmp_path / "1" / "runs" / "synthetic-paper.json"
    damaged.write_text("{}")
    with pytest.raises(StoreError, match=f"{damaged} is damaged"):
        reproduction.merge([tmp_path / "1"], tmp_path / "refused")


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
    assert "and its means cannot be merged: leave one of them out" in output


@pytest.mark.parametrize("arguments", [("--cluster-options", "partition=gpu"), ("--device", "cuda")])
def test_what_needs_slurm_fails_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, output = run("reproduce", "--cluster", *arguments, "--out", str(tmp_path / "out"))
    assert code == 1
    assert "Slurm" in output
    assert not (tmp_path / "out").exists()


def test_options_of_the_cluster_may_have_commas() -> None:
    found = commands._cluster_resources("partition=a,b,gpus-per-node=1, account=007", cluster=True)
    assert found == {"partition": "a,b", "gpus_per_node": "1", "account": "007"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "3/2"), "must be I/N with 1 <= I <= N, got '3/2'"),
        (("--only", "half"), "must be I/N with 1 <= I <= N, got 'half'"),
        (("--cluster-options", "time=5"), "is for --cluster only"),
        (("--cluster", "--cluster-options", "time"), "must be key=value,key=value, got 'time'"),
        (("--cluster", "--cluster-options", "time=5,nodes="), "must be key=value,key=value, got 'nodes='"),
        (("--cluster", "--device", "nonsense"), "'nonsense' cannot be used: Expected one of cpu"),
        (("synthetic", "--cluster"), "the quadratic runs here, in a minute; leave it out"),
        (("--strength", "inf"), "must be a number >= 0, got inf"),
        (("--first-seed", str(2**40)), "Invalid value for '--first-seed'"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, output = run("reproduce", "--out", str(tmp_path / "out"), *arguments)
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()
