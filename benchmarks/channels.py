"""Remove a quarter of the channels of a ResNet-18 on CIFAR-10, by a strength or by a target.

`python -m benchmarks.channels --cifar10 FOLDER` trains as `proxmo reproduce regularized --preset medium` does: width 8,
30 epochs with batches of 256, lr 0.1 and momentum 0.9. ψ is ℓ∞,1 with several strengths, or trimmed, with the target
to keep three quarters of the channels of each layer. A command that was killed continues where it was.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.progress import Progress

import proxmo
from benchmarks.output import BLUE, GREY, ORANGE, made_with, write
from proxmo import GroupLInf, KeepScheduler, Trimmed
from proxmo.experiments.data import load
from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job, run_jobs
from proxmo.experiments.regularized import RegularizedTrainer
from proxmo.experiments.store import open_store
from proxmo.experiments.training import Record, Setting, run_name

SETTING = Setting(lr=0.1, momentum=0.9, batch=256, epochs=30, width=8, seed=0)
STRENGTHS = (0.1, 0.3, 0.5, 0.8)
KEEP = 0.75
COLOURS = (GREY, "#CC79A7", "#56B4E9", BLUE, ORANGE)
COLUMNS = ("ψ", "zero channels", "zero weights", "training loss", "test accuracy")


class KeepTrainer(RegularizedTrainer):
    """Removes as many channels as the target asks for, and penalises no others."""

    def __init__(self, setting: Setting, images: Images, device: str) -> None:
        super().__init__(setting, images, device)
        convolutions, others = self.optimizer.param_groups
        others["params"].append(convolutions["params"].pop())  # the head: no class may vanish
        convolutions["penalty"] = Trimmed(GroupLInf(1.0, dim=0), 1.0, scope="each")
        self.target = KeepScheduler(self.optimizer, KEEP, horizon=setting.epochs * len(self.batches))
        self.optimizer.register_step_post_hook(lambda *_: self.target.step())

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "target": self.target}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cifar10", type=Path, required=True, help="folder with CIFAR-10, see `proxmo data`")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    trainers: dict[str, Any] = {f"strength{s:g}": partial(RegularizedTrainer, strength=s) for s in STRENGTHS}
    trainers[f"keep{KEEP:g}"] = KeepTrainer
    jobs = [Job(name, SETTING, trainer) for name, trainer in trainers.items()]
    with open_store(options.out / "channels") as store, Progress() as progress:
        settings = {"proxmo": proxmo.__version__, "torch": torch.__version__}
        store.begin(dict.fromkeys(trainers, settings), resume=any(map(store.settings, trainers)))
        bar = progress.add_task("epochs", total=len(jobs) * SETTING.epochs)
        run_jobs(jobs, partial(load, "cifar10", options.cifar10), "cpu", store, partial(progress.advance, bar))
        runs = [store.record(run_name(name, SETTING), Record.from_json) for name in trainers]
    labels = [f"ℓ∞,1, strength {s:g}" for s in STRENGTHS] + [f"target: keep {KEEP:.0%}"]
    found = dict(zip(labels, runs, strict=True))
    numbers = {"made with": made_with(), "runs": {label: run.to_json() for label, run in found.items()}}
    write(options.out, "channels", numbers, draw(found), COLUMNS, [row(*item) for item in found.items()])


def row(label: str, run: Record) -> tuple[str, ...]:
    last = run.last
    shares = (f"{share:.1%}" for share in (last.zero_channels, last.zero_weights))
    return label, *shares, f"{last.train_loss:.3f}", f"{last.test_accuracy:.1%}"


def draw(runs: dict[str, Record]) -> Figure:
    """Draw zero channels and test accuracy by epoch."""
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, field, title in zip(
        panels, ("zero_channels", "test_accuracy"), ("zero channels", "test accuracy"), strict=True
    ):
        for (label, run), colour in zip(runs.items(), COLOURS, strict=True):
            axes.plot(range(1, len(run.epochs) + 1), [getattr(e, field) for e in run.epochs], color=colour, label=label)
        axes.set(title=title, xlabel="epoch", ylim=(-0.02, None))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main()
