"""The command line, as a user runs it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import proxmo
from experiments.few_images import few_images, loader
from proxmo.cli import REQUIRED
from proxmo.experiments import comparison, proxy, synthetic
from proxmo.experiments.commands import app
from proxmo.experiments.images import Images, Split
from proxmo.experiments.presets import Grid, Presets, Size
from proxmo.experiments.proxy import Proxy, ProxyTrainer, Subset
from proxmo.experiments.regularized import Regularized, RegularizedTrainer
from proxmo.experiments.training import Setting, Trainer, run_name
from proxmo.files import written_whole

REGULARIZED = Size(8, Grid((256, 128), rates=(0.1,), momenta=(0.0, 0.9), epochs=2), seeds=2)
PROXY = Size(8, Grid((256,), rates=(0.1,), momenta=(0.0, 0.9), epochs=1), seeds=2)
SUBSET = Subset(images=128, batch=64)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the same code with few steps and images, and train in one worker: each one takes seconds to start."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    for module in (comparison, proxy):
        monkeypatch.setattr(module, "load", loader(few_images(train=288, test=60)))
    monkeypatch.setattr(synthetic, "ITERATIONS", 100)
    monkeypatch.setattr(synthetic, "AUTO_SEEDS", 1)
    monkeypatch.setattr(Regularized, "sizes", Presets(*[REGULARIZED] * 4))
    monkeypatch.setattr(Proxy, "sizes", Presets(*[PROXY] * 4))
    monkeypatch.setattr(Proxy, "subsets", Presets(*[SUBSET] * 4))


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "100"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join((done.output + done.stderr).split())


@pytest.mark.usefixtures("tiny")
def test_reproduce_runs_all_protects_existing_results_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    code, output = run("reproduce", "--seeds", "2", "--out", str(out))
    assert code == 0
    assert "A noisy quadratic (section 8.1)" in output
    assert output.endswith(f"report: {out}/report.html")
    numbers = json.loads((out / "results.json").read_text())
    assert set(numbers) == {"synthetic", "regularized", "proxy", "claims", "settings"}
    assert numbers["settings"]["proxy"]["command"] == "proxmo reproduce proxy --preset quick --data digits --seeds 2"
    cells = numbers["synthetic"]["cells"]
    assert {cell["method"] for cell in cells} == {"momentum", "vanilla", "plan", "decreasing", "auto"}
    assert set(cells[0]) == {
        "method", "sigma", "M", "gamma", "batch", "hit_share", "median_samples", "stationary", "closed_form",
    }  # fmt: skip
    runs = numbers["regularized"]["runs"]
    assert [r["setting"]["batch"] for r in runs] == [256, 256, 256, 256, 128, 128]  # sorted; a second seed for 256
    assert [r["setting"]["seed"] for r in runs] == [0, 1, 0, 1, 0, 0]
    assert all(len(r["epochs"]) == 2 for r in runs)
    assert len(numbers["proxy"]["runs"]) == 4
    assert {claim["agrees"] for claims in numbers["claims"].values() for claim in claims} == {True, False}

    code, output = run("reproduce", "proxy", "--seeds", "3", "--resume", "--out", str(out))
    assert code == 1
    assert "was started with other settings: seeds was ['0-1'], now ['0-2']" in output
    code, output = run("reproduce", "--seeds", "2", "--out", str(out))
    assert code == 1
    assert "already has results of synthetic: continue with --resume, or choose another --out" in output
    assert json.loads((out / "results.json").read_text()) == numbers
    (out / "report.html").unlink()
    kept = next((out / "runs").glob("regularized-batch256-*-momentum0.9-*.json"))
    written = kept.stat().st_mtime_ns
    next((out / "runs").glob("regularized-batch128-*-momentum0.9-*.json")).unlink()
    assert run("reproduce", "regularized", "--seeds", "2", "--resume", "--out", str(out))[0] == 0
    assert kept.stat().st_mtime_ns == written  # a finished run is not repeated
    resumed = json.loads((out / "results.json").read_text())
    assert resumed["synthetic"] == numbers["synthetic"]  # the report covers everything in the folder
    assert "A noisy quadratic" in (out / "report.html").read_text()
    for one, other in zip(numbers["regularized"]["runs"], resumed["regularized"]["runs"], strict=True):
        assert one["setting"] == other["setting"]
        assert one["epochs"] == other["epochs"]


def test_reproduce_rejects_unusable_options_before_it_starts(tmp_path: Path) -> None:
    code, output = run("reproduce", "--data", "cifar10", "--root", str(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 1
    assert "CIFAR-10 is not in" in output
    assert "proxmo data cifar10" in output
    assert not (tmp_path / "out").exists()
    code, output = run("reproduce", "--device", "abacus", "--out", str(tmp_path / "out"))
    assert code == 2
    assert "'abacus' cannot be used here" in output
    code, output = run("reproduce", "--preset", "paper", "--root", str(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 1
    assert "CIFAR-10 is not in" in output  # the default data of this preset
    paper = ("reproduce", "proxy", "--preset", "paper", "--data", "digits", "--device", "cpu:0")
    code, output = run(*paper, "--out", str(tmp_path / "out"))
    assert code == 1
    assert "uses 2560 images as proxy, which must be at most half of the training images; digits has 1437" in output
    code, output = run("reproduce", "--resume", "--out", str(tmp_path / "mistyped"))
    assert code == 1
    assert "there is nothing to resume in" in output
    code, output = run("reproduce", "--preset", "huge")
    assert code == 2
    assert "'huge' is not one of 'quick', 'medium', 'paper'" in output


def test_paper_preset_has_the_sizes_of_the_paper() -> None:
    size = Regularized.sizes.paper
    assert (size.width, size.grid.batches, size.grid.epochs) == (64, (256, 128, 64), 300)
    assert (Proxy.sizes.paper.width, Proxy.sizes.paper.grid.batches) == (64, (512,))
    assert Proxy.subsets.paper == Subset(images=2560, batch=128)


def paper_settings(size: Size) -> list[Any]:
    """Return every distinct setting."""
    settings = comparison._cells(size.grid, size.width, seed=0)
    return [pytest.param(setting, id=run_name("paper", setting)) for setting in settings]


def coloured_noise(count: int, side: int = 32) -> Images:
    """Return images, by default of the size of CIFAR-10's."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, side, side, 3), generator=generator, dtype=torch.uint8)
    split = Split(pixels, torch.randint(10, (count,), generator=generator))
    return Images("noise", split, split, classes=10, padding=4, flip=True)


def assert_one_step_trains(trainer: Trainer) -> None:
    assert sum(p.numel() for p in trainer.network.parameters()) == 11_173_962
    before = [p.detach().clone() for p in trainer.network.parameters()]
    assert len(trainer.batches) == 1
    assert math.isfinite(trainer.train_epoch())
    after = list(trainer.network.parameters())
    assert all(bool(p.isfinite().all()) for p in after)
    assert not any(torch.equal(p, q) for p, q in zip(before, after, strict=True))


def test_full_network_takes_a_step_on_small_images() -> None:
    setting = Setting(0.1, 0.9, batch=32, epochs=300, width=64, seed=0)
    assert_one_step_trains(RegularizedTrainer(setting, coloured_noise(32, side=8), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", paper_settings(Regularized.sizes.paper))
def test_regularized_training_takes_a_step_with_the_full_network(setting: Setting) -> None:
    assert_one_step_trains(RegularizedTrainer(setting, coloured_noise(setting.batch), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", paper_settings(Proxy.sizes.paper))
def test_proxy_training_takes_a_step_with_the_full_network(setting: Setting) -> None:
    """Of ℓ̂, 256 images stand for 2,560, so that an epoch of ℓ is one step."""
    assert_one_step_trains(ProxyTrainer(setting, coloured_noise(setting.batch), "cpu", 256, Proxy.subsets.paper.batch))


def test_data_reports_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("mine")
    code, output = run("data", "cifar10", "--root", str(tmp_path / "plain"))
    assert code == 1
    assert "Not a directory" in output


def test_reproduce_writes_to_the_out_folder_only(tmp_path: Path) -> None:
    script = """
from proxmo.experiments import synthetic
synthetic.ITERATIONS, synthetic.AUTO_SEEDS = 50, 1
import sys
from proxmo.cli import main
sys.argv = ["proxmo", "reproduce", "synthetic", "--seeds", "2", "--quiet", "--out", "../out"]
main()
"""
    for name in ("home", "work", "temporary"):
        (tmp_path / name).mkdir()
    folders = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary"), "PYTHONDONTWRITEBYTECODE": "1"}
    unset = {"XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLCONFIGDIR"}
    environment = {key: value for key, value in os.environ.items() if key not in unset} | folders
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path / "work", env=environment, check=True)
    assert (tmp_path / "out" / "report.html").exists()
    written = [path.name for name in ("home", "work", "temporary") for path in (tmp_path / name).rglob("*")]
    assert [name for name in written if not name.startswith("torchinductor_")] == []  # torch creates that empty folder


def test_command_without_its_extra_says_what_to_install() -> None:
    """The commands share one process, since importing torch takes seconds."""
    commands = [([], REQUIRED), (["--help"], REQUIRED), (["reproduce"], REQUIRED), (["verify"], ("matplotlib",))]
    program = f"""
import sys
for arguments, missing in {commands}:
    sys.argv = ["proxmo", *arguments]
    sys.modules |= dict.fromkeys(missing)
    from proxmo.cli import main  # the library itself works without these packages
    try:
        main()
    except SystemExit as end:  # a text is printed to stderr, and the exit code is 1
        print(end.code, file=sys.stderr)
    for name in missing:
        del sys.modules[name]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"proxmo: this command needs {', '.join(missing)}: pip install 'proxmo[reproduce]'" for _, missing in commands
    ]


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.output == f"proxmo {proxmo.__version__}\n"


def test_reproduce_rejects_an_unwritable_folder_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, output = run("reproduce", "--out", str(tmp_path / "file"))
    assert code == 1
    assert "cannot write to" in output
    assert (tmp_path / "file").read_text() == "mine"


def test_files_are_written_completely_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "numbers.txt"
    target.write_text("old")

    def fail() -> None:
        with written_whole(target) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with written_whole(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o644
