"""Momentum against vanilla on a network: a grid with one seed, the best of each method with more seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean, stdev
from typing import Any, NamedTuple

from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job, run_jobs
from proxmo.experiments.presets import Grid, Preset
from proxmo.experiments.proxy import ProxyTrainer
from proxmo.experiments.regularized import RegularizedTrainer
from proxmo.experiments.store import Store
from proxmo.experiments.training import Record, Setting, Trainer

PAPER_RATE = 0.1


class Summary(NamedTuple):
    """Mean and, of more than one seed, standard deviation."""

    mean: float
    deviation: float | None

    def said(self, form: str) -> str:
        """In words.

        >>> Summary(0.5, 0.01).said(".1%"), Summary(0.5, None).said(".2f")
        ('50.0% ± 1.0%', '0.50')
        """
        return f"{self.mean:{form}}" + ("" if self.deviation is None else f" ± {self.deviation:{form}}")


@dataclass(frozen=True)
class Comparison:
    """All runs of an experiment, and which of them are compared with several seeds."""

    experiment: str
    records: list[Record]

    def of(self, **wanted: float) -> list[Record]:
        """The runs with these values in their setting."""
        return [r for r in self.records if all(getattr(r.setting, key) == value for key, value in wanted.items())]

    def tuned(self, batch: int, *, vanilla: bool) -> Setting:
        """The best setting of a method at a batch size: the least training loss at the end, as in the paper."""
        runs = [r for r in self.of(batch=batch, seed=0) if (r.setting.momentum == 0) == vanilla]
        return min(runs, key=lambda run: math.inf if run.diverged else run.last.train_loss).setting

    def seeds(self, setting: Setting) -> list[Record]:
        """The runs of a setting with all seeds."""
        return [r for r in self.records if replace(r.setting, seed=0) == replace(setting, seed=0)]

    def summary(self, setting: Setting, measure: str) -> Summary | None:
        """What was measured at the end, over the seeds; ``None`` if one of them diverged."""
        runs = self.seeds(setting)
        if any(run.diverged for run in runs):
            return None
        values = [getattr(run.last, measure) for run in runs]
        return Summary(mean(values), stdev(values) if len(values) > 1 else None)

    @property
    def batches(self) -> list[int]:
        """All batch sizes, the largest first."""
        return sorted({record.setting.batch for record in self.records}, reverse=True)

    def to_json(self) -> dict[str, Any]:
        """Every number, for programs."""
        return {"runs": [record.to_json() for record in self.records]}


def compare(
    experiment: str,
    preset: Preset,
    seeds: int,
    load: Callable[[], Images],
    device: str,
    store: Store,
    progress: Callable[[int, int], None],
) -> Comparison:
    """Run the experiment ``"regularized"`` or ``"proxy"``.

    Args:
        experiment: which one.
        preset: its size.
        seeds: for the settings that are compared.
        load: loads the images.
        device: where to train.
        store: where finished runs are found and new ones kept.
        progress: told the epochs done since the last call, and how many there will be in all, as far as is known.
    """
    grid: Grid = getattr(preset, experiment)
    trainer: Callable[[Setting, Images, str], Trainer] = RegularizedTrainer
    if experiment == "proxy":
        trainer = partial(ProxyTrainer, proxy_images=preset.proxy_images, proxy_batch=preset.proxy_batch)
    cells = [
        Setting(lr, momentum, batch, grid.epochs, preset.width, seed=0)
        for batch, lr, momentum in product(grid.batches, grid.rates, grid.momenta)
    ]
    expected = (len(cells) + (seeds - 1) * 4) * grid.epochs

    def run(settings: list[Setting], total: int) -> list[Record]:
        jobs = [Job(experiment, setting, trainer) for setting in settings]
        return run_jobs(jobs, load, device, store, lambda done: progress(done, total)) if jobs else []

    found = Comparison(experiment, run(cells, expected))
    largest = grid.batches[0]
    main = {found.tuned(largest, vanilla=True), found.tuned(largest, vanilla=False)}
    if experiment == "regularized":  # the paper's own setting, too
        main |= {s for s in cells if (s.batch, s.lr) == (largest, PAPER_RATE) and s.momentum in (0.0, 0.9)}
    again = [replace(setting, seed=seed) for setting in sorted(main, key=str) for seed in range(1, seeds)]
    more = run(again, (len(cells) + len(again)) * grid.epochs)
    return Comparison(experiment, found.records + more)
