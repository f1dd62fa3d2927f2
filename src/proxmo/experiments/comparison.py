"""Experiments that compare momentum with the vanilla method on ResNet-18."""

from __future__ import annotations

import math
import shlex
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar, NamedTuple

from proxmo.experiments.data import load
from proxmo.experiments.experiment import Experiment, Options, Progress
from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job, run_jobs
from proxmo.experiments.presets import Grid, Presets, Size
from proxmo.experiments.report import Section
from proxmo.experiments.seeds import as_range, as_text
from proxmo.experiments.store import Store, StoreError
from proxmo.experiments.training import Record, Setting, Trainer, has_fast_bfloat16, run_name


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
PENALTY = Measure("penalty", "ψ", ".3f")
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
    stands_for: ClassVar[dict[int, int]] = {}
    """For batch sizes that the paper does not have: the one with about as many steps per epoch on its data."""

    @abstractmethod
    def trainer(self, options: Options) -> Callable[[Setting, Images, str], Trainer]:
        """Return what makes the trainer of a run; it must be picklable."""

    def size(self, options: Options) -> Size:
        """Return the size of the experiment."""
        return self.sizes.choose(options.preset, options.data)

    def check(self, options: Options) -> None:
        load(options.data, options.root)
        if options.cluster is not None:
            from proxmo.experiments.cluster import check_place

            check_place(options.device, options.cluster)

    def arguments(self, options: Options) -> list[str]:
        found = [f"--preset {options.preset}", f"--data {options.data}"]
        if options.root is not None:
            found.append(f"--root {shlex.quote(str(options.root))}")
        if options.seeds is not None:
            found.append(f"--seeds {options.seeds}")
        if options.first_seed:
            found.append(f"--first-seed {options.first_seed}")
        if options.device != "cpu":
            found.append(f"--device {options.device}")
        return found

    def conditions(self, options: Options) -> dict[str, Any]:
        size = self.size(options)
        return {
            "data": options.data,
            "seeds": [as_text(options.first_seed, options.seeds or size.seeds)],
            "device": options.device.split(":")[0],
            "bfloat16": has_fast_bfloat16(options.device),
            "width": size.width,
            "grid": size.grid.to_json(),
        }

    def run(self, options: Options, store: Store, progress: Progress) -> None:
        size, first = self.size(options), options.first_seed
        seeds = range(first, first + (options.seeds or size.seeds))
        cells = _cells(size.grid, size.width, first)
        self._train(cells, len(cells) + 4 * (len(seeds) - 1), options, store, progress)
        if (found := self._finished(cells, store)) is None:  # other machines have the rest
            return
        again = self._further(found, size.grid, seeds)
        self._train(again, len(cells) + len(again), options, store, progress)
        if (more := self._finished(again, store)) is not None:
            store.finish(f"{self.name}-all", _as_json(options.data, found + more))

    def _further(self, cells: list[Record], grid: Grid, seeds: range) -> list[Setting]:
        """Return the best settings of a whole grid, and the paper's, with all seeds but the first."""
        comparison = Comparison(self, cells)
        repeated = grid.batches if grid.repeat_all else grid.batches[:1]
        best = {comparison.tuned(batch, vanilla=vanilla) for batch in repeated for vanilla in (True, False)}
        at_paper = comparison.matching(batch=grid.batches[0], lr=self.paper_lr, annealed=False)
        best |= {run.setting for run in at_paper if run.setting.momentum in (0.0, 0.9)}
        return [replace(setting, seed=seed) for setting in sorted(best, key=str) for seed in seeds[1:]]

    def _train(self, settings: list[Setting], runs: int, options: Options, store: Store, progress: Progress) -> None:
        """Train with these settings, or a share of them; ``runs`` is the expected total, for the progress bar."""
        if options.only is not None:
            i, n = options.only
            settings, runs = settings[i - 1 :: n], -(-runs // n)
        if not settings:
            return
        total = runs * settings[0].epochs
        jobs = [Job(self.name, setting, self.trainer(options)) for setting in settings]
        load_images = partial(load, options.data, options.root)

        def advance(done: int) -> None:
            progress(done, total)

        if options.cluster is None:
            run_jobs(jobs, load_images, options.device, store, advance)
        else:
            from proxmo.experiments.cluster import run_on_cluster

            bfloat16 = self.conditions(options)["bfloat16"]
            run_on_cluster(
                jobs, load_images, options.device, store, advance, resources=options.cluster, bfloat16=bfloat16
            )

    def _finished(self, settings: list[Setting], store: Store) -> list[Record] | None:
        """Return the records of these settings; ``None`` if one is missing."""
        records = [store.record(run_name(self.name, setting), Record.from_json) for setting in settings]
        return None if None in records else records  # type: ignore[return-value]

    def missing(self, store: Store) -> list[str]:
        runs = {run.setting: run for run in store.records(f"{self.name}-batch", Record.from_json)}
        wanted = store.settings(self.name, partial(self._wanted, runs)) or set()
        return sorted(run_name(self.name, setting) for setting in wanted - set(runs))

    def merged(self, stores: list[Store], settings: dict[str, Any]) -> dict[str, Any]:
        runs: dict[Setting, Record] = {}
        folders: dict[Setting, Path] = {}
        differing: dict[Setting, Path] = {}
        for other in stores:
            for run in other.records(f"{self.name}-batch", Record.from_json):
                folders.setdefault(run.setting, other.folder)
                if replace(runs.setdefault(run.setting, run), seconds=run.seconds) != run:
                    differing[run.setting] = other.folder
        wanted = self._wanted(runs, settings)
        for setting in wanted & set(differing):
            name, both = run_name(self.name, setting), f"{folders[setting]} and {differing[setting]}"
            raise StoreError(f"{name} differs between {both}: leave one of them out")
        grid = {cell for cells in self._grids(settings).values() for cell in cells}
        if missing := sorted(run_name(self.name, setting) for setting in grid - set(runs)):
            raise StoreError(f"{len(missing)} of {len(grid)} runs of the grid are in no folder, such as {missing[0]}")
        merged = [run for setting, run in runs.items() if setting in wanted]
        records = {run_name(self.name, run.setting): run.to_json() for run in merged}
        return {**records, f"{self.name}-all": _as_json(settings["data"], merged)}

    def _grids(self, settings: dict[str, Any]) -> dict[range, list[Setting]]:
        """Return the grid, with the first seed, for each range of seeds."""
        grid, width = Grid(**settings["grid"]), settings["width"]
        return {seeds: _cells(grid, width, seeds[0]) for seeds in map(as_range, settings["seeds"])}

    def _wanted(self, runs: dict[Setting, Record], settings: dict[str, Any]) -> set[Setting]:
        """Return what the settings ask for; the further seeds can be told where the whole grid is there."""
        wanted: set[Setting] = set()
        for seeds, cells in self._grids(settings).items():
            wanted.update(cells)
            if all(cell in runs for cell in cells):
                wanted.update(self._further([runs[cell] for cell in cells], Grid(**settings["grid"]), seeds))
        return wanted

    def results(self, store: Store) -> tuple[Section, dict[str, Any]] | None:
        def read(record: dict[str, Any]) -> tuple[Section, dict[str, Any]]:
            from proxmo.experiments.comparison_report import section  # imports matplotlib

            runs = [Record.from_json(run) for run in record["runs"]]
            missing = len(self.missing(store))
            return section(Comparison(self, runs), record["data"], store.settings(self.name) or {}, missing), record

        return store.record(f"{self.name}-all", read)


def _cells(grid: Grid, width: int, seed: int) -> list[Setting]:
    """Return all settings of a grid."""
    cells = [
        Setting(lr, momentum, batch, grid.epochs, width, seed)
        for batch, lr, momentum in product(grid.batches, grid.rates, grid.momenta)
    ]
    if grid.annealed is not None:
        cells += [
            Setting(grid.annealed, momentum, grid.batches[0], grid.epochs, width, seed, annealed=True)
            for momentum in grid.momenta
            if momentum
        ]
    return cells


def _as_json(data: str, runs: list[Record]) -> dict[str, Any]:
    """Return the record of a whole experiment; the order of its runs does not depend on where they were made."""

    def order(run: Record) -> tuple[float, ...]:
        s = run.setting
        return -s.batch, -s.lr, s.momentum, s.annealed, s.seed

    return {"data": data, "runs": [run.to_json() for run in sorted(runs, key=order)]}


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
        runs = [
            r
            for r in self.matching(batch=batch, seed=self.first_seed, annealed=False)
            if (r.setting.momentum == 0) == vanilla
        ]
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
    def first_seed(self) -> int:
        """The seed of the grid."""
        return min(record.setting.seed for record in self.records)

    @property
    def batches(self) -> list[int]:
        """All batch sizes, the largest first."""
        return sorted({record.setting.batch for record in self.records}, reverse=True)
