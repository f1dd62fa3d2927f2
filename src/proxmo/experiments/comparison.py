"""Experiments that compare momentum with the vanilla method on ResNet-18."""

from __future__ import annotations

import math
import shlex
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean, stdev
from typing import Any, ClassVar, NamedTuple

from proxmo.experiments.data import load
from proxmo.experiments.experiment import Experiment, Options, Progress
from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job, run_jobs
from proxmo.experiments.presets import Presets, Size
from proxmo.experiments.report import Section
from proxmo.experiments.store import Store
from proxmo.experiments.training import Record, Setting, Trainer, has_fast_bfloat16


class Summary(NamedTuple):
    """The mean over seeds and, for more than one seed, the standard deviation."""

    mean: float
    deviation: float | None

    def text(self, form: str) -> str:
        """Format both numbers.

        >>> Summary(0.5, 0.01).text(".1%"), Summary(0.5, None).text(".2f")
        ('50.0% ± 1.0%', '0.50')
        """
        return f"{self.mean:{form}}" + ("" if self.deviation is None else f" ± {self.deviation:{form}}")


@dataclass(frozen=True)
class Measure:
    """A number measured after every epoch, and how the report shows it."""

    field: str
    """The attribute of `Epoch`."""
    column: str
    """The heading of its column in tables."""
    form: str
    """How to format it."""
    panel: str = ""
    """The title of its panel in figures; empty if it has none."""
    log: bool = False
    """Whether its axis is logarithmic."""
    from_zero: bool = False
    """Whether its axis starts just below zero, so that a line at zero is visible."""


TRAIN_LOSS = Measure("train_loss", "training loss", ".3f", "training loss", log=True)
TEST_ACCURACY = Measure("test_accuracy", "test accuracy", ".1%", "test accuracy")
OBJECTIVE = Measure("objective", "F", ".3f", "F = f + ψ", log=True)
ZERO_WEIGHTS = Measure("zero_weights", "zero weights", ".1%", "share of zero weights", from_zero=True)
ZERO_CHANNELS = Measure("zero_channels", "zero channels", ".1%")


class TrainingExperiment(Experiment):
    """Momentum against vanilla: the whole grid with one seed, then the best setting of each method with more seeds."""

    text: ClassVar[str]
    """What f and ψ are, for the report."""
    sizes: ClassVar[Presets[Size]]
    measures: ClassVar[tuple[Measure, ...]] = (TRAIN_LOSS, TEST_ACCURACY)
    paper_lr: ClassVar[float | None] = None
    """The lr at which the paper compares momentum 0.9 with the vanilla method, if it gives one."""
    paper_best_lr: ClassVar[dict[int, float]] = {}
    """For each batch size the lr that the paper found best for momentum, always with momentum 0.9."""

    @abstractmethod
    def trainer(self, options: Options) -> Callable[[Setting, Images, str], Trainer]:
        """Return what makes the trainer of a run; it must be picklable."""

    def size(self, options: Options) -> Size:
        """Return the size of the experiment."""
        return self.sizes.choose(options.preset, options.data)

    def check(self, options: Options) -> None:
        load(options.data, options.root)

    def arguments(self, options: Options) -> list[str]:
        found = [f"--preset {options.preset}", f"--data {options.data}"]
        if options.root is not None:
            found.append(f"--root {shlex.quote(str(options.root))}")
        if options.seeds is not None:
            found.append(f"--seeds {options.seeds}")
        if options.device != "cpu":
            found.append(f"--device {options.device}")
        return found

    def conditions(self, options: Options) -> dict[str, Any]:
        size = self.size(options)
        return {
            "data": options.data,
            "seeds": options.seeds or size.seeds,
            "device": options.device.split(":")[0],
            "bfloat16": has_fast_bfloat16(options.device),
            "width": size.width,
            "grid": str(size.grid),
        }

    def run(self, options: Options, store: Store, progress: Progress) -> None:
        size, trainer = self.size(options), self.trainer(options)
        grid, seeds = size.grid, options.seeds or size.seeds
        cells = [
            Setting(lr, momentum, batch, grid.epochs, size.width, seed=0)
            for batch, lr, momentum in product(grid.batches, grid.rates, grid.momenta)
        ]

        def train(settings: list[Setting], runs: int) -> list[Record]:
            """Train with these settings; ``runs`` is the expected total, for the progress bar."""
            jobs = [Job(self.name, setting, trainer) for setting in settings]
            images, total = partial(load, options.data, options.root), runs * grid.epochs
            return run_jobs(jobs, images, options.device, store, lambda done: progress(done, total)) if jobs else []

        found = Comparison(self, train(cells, len(cells) + 4 * (seeds - 1)))
        largest = grid.batches[0]
        best = {found.tuned(largest, vanilla=True), found.tuned(largest, vanilla=False)}
        best |= {s for s in cells if (s.batch, s.lr) == (largest, self.paper_lr) and s.momentum in (0.0, 0.9)}
        again = [replace(setting, seed=seed) for setting in sorted(best, key=str) for seed in range(1, seeds)]
        runs = found.records + train(again, len(cells) + len(again))
        store.finish(f"{self.name}-all", {"data": options.data, "runs": [run.to_json() for run in runs]})

    def results(self, store: Store) -> tuple[Section, dict[str, Any]] | None:
        settings = store.settings(self.name)

        def read(record: dict[str, Any]) -> tuple[Section, dict[str, Any]]:
            from proxmo.experiments.comparison_report import section  # imports matplotlib

            runs = [Record.from_json(run) for run in record["runs"]]
            return section(Comparison(self, runs), record["data"], settings), record

        return store.record(f"{self.name}-all", read)


@dataclass(frozen=True)
class Comparison:
    """All runs of a training experiment."""

    experiment: TrainingExperiment
    records: list[Record]

    def matching(self, **wanted: float | None) -> list[Record]:
        """Return the runs with these values in their setting."""
        return [r for r in self.records if all(getattr(r.setting, key) == value for key, value in wanted.items())]

    def tuned(self, batch: int, *, vanilla: bool) -> Setting:
        """Return the best setting of a method at a batch size: as in the paper, by the final training loss."""
        runs = [r for r in self.matching(batch=batch, seed=0) if (r.setting.momentum == 0) == vanilla]
        return min(runs, key=lambda run: math.inf if run.diverged else run.last.train_loss).setting

    def seeds(self, setting: Setting) -> list[Record]:
        """Return the runs of a setting with any seed."""
        return [r for r in self.records if replace(r.setting, seed=0) == replace(setting, seed=0)]

    def summary(self, setting: Setting, measure: str) -> Summary | None:
        """Summarise a final measurement over the seeds; ``None`` if a seed diverged."""
        runs = self.seeds(setting)
        if any(run.diverged for run in runs):
            return None
        values = [getattr(run.last, measure) for run in runs]
        return Summary(mean(values), stdev(values) if len(values) > 1 else None)

    @property
    def batches(self) -> list[int]:
        """All batch sizes, the largest first."""
        return sorted({record.setting.batch for record in self.records}, reverse=True)
