"""The contract of an experiment: run into a store, then turn what is stored into a section of the report."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

import proxmo
from proxmo.experiments.presets import PresetName
from proxmo.experiments.report import Section
from proxmo.experiments.store import Store

Resources: TypeAlias = dict[str, str]
"""Options of a Slurm job, named as those of sbatch: partition, time, gpus_per_node, …; flags are "true"."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of steps done since the last call, and the total number of steps."""


STRENGTH = 0.1  # of the penalty in regularized training, in the paper


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes:
        preset: the size of the training experiments.
        data: the data set of the training experiments.
        root: the folder of the data set; ``None`` for its default.
        seeds: the number of independent runs; ``None`` for the default of each experiment.
        device: where to train.
        strength: of the penalty in regularized training.
        first_seed: the first of the seeds, so that several machines can have different ones.
        only: (i, n) to run every n-th job only, beginning with the i-th, i = 1 … n; ``None`` for all.
        cluster: the resources of jobs on a cluster; ``None`` to train on this machine.
    """

    preset: PresetName
    data: str
    root: Path | None
    seeds: int | None
    device: str
    strength: float = STRENGTH
    first_seed: int = 0
    only: tuple[int, int] | None = None
    cluster: Resources | None = None


class Experiment(ABC):
    """One experiment of the paper. To add one, write a subclass and list it in `reproduction.EXPERIMENTS`."""

    name: ClassVar[str]
    """Its name on the command line; the names of its runs in the store start with it and a hyphen."""
    title: ClassVar[str]
    """The title of its section in the report."""

    @abstractmethod
    def check(self, options: Options) -> None:
        """Raise `DataError` or `StoreError` if the experiment cannot run with these options, before any work."""

    @abstractmethod
    def arguments(self, options: Options) -> list[str]:
        """Return the command-line options that repeat the run."""

    @abstractmethod
    def conditions(self, options: Options) -> dict[str, Any]:
        """Return what the numbers depend on, except for software versions and the machine."""

    def settings(self, options: Options) -> dict[str, Any]:
        """Return what the store records of a run; a run can only be resumed with the same settings."""
        return {
            "command": " ".join(["proxmo reproduce", self.name, *self.arguments(options)]),
            **self.conditions(options),
            "proxmo": proxmo.__version__,
            "torch": str(torch.__version__),
            "machine": platform.machine(),
        }

    @abstractmethod
    def run(self, options: Options, store: Store, progress: Progress) -> None:
        """Run everything that the store does not have yet, or the share that ``options.only`` names."""

    @abstractmethod
    def missing(self, store: Store) -> list[str]:
        """Return the names of the records that the settings in the store ask for and that it does not have."""

    @abstractmethod
    def merged(self, stores: list[Store], settings: dict[str, Any]) -> dict[str, Any]:
        """Return by name all records that a store with the results of all of these has, and with these settings.

        Raise `StoreError` if something is missing or does not fit together.
        """

    @abstractmethod
    def results(self, store: Store) -> tuple[Section, dict[str, Any]] | None:
        """Return the section of the report and the numbers behind it, or ``None`` if the store has no results."""
