"""Run experiments into a folder, and write a report of everything in that folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from proxmo.experiments.experiment import Experiment, Options
from proxmo.experiments.proxy import Proxy
from proxmo.experiments.regularized import Regularized
from proxmo.experiments.report import Section, render
from proxmo.experiments.store import Store, StoreError, open_store
from proxmo.experiments.synthetic import Synthetic

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Synthetic(),
        Regularized(),
        Proxy(),
    )
}
"""Every experiment, in the order of the report."""

Bar: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of an experiment, then as `experiment.Progress` is."""


@dataclass(frozen=True)
class Outcome:
    """The sections of the report, and the files that were written; ``None`` as long as no experiment is complete."""

    sections: list[Section]
    report: Path | None
    numbers: Path | None


def reproduce(experiments: Iterable[Experiment], options: Options, out: Path, bar: Bar, *, resume: bool) -> Outcome:
    """Run experiments, then write ``report.html`` and ``results.json`` for all results in the folder.

    Args:
        experiments: what to run, in this order.
        options: what the user chose.
        out: the folder.
        bar: shows the progress.
        resume: continue what is in the folder.
    """
    experiments = list(experiments)
    for experiment in experiments:
        experiment.check(options)
    with open_store(out) as store:
        store.begin({experiment.name: experiment.settings(options) for experiment in experiments}, resume=resume)
        for experiment in experiments:
            experiment.run(options, store, partial(bar, experiment.name))
        return _write(store)


def merge(folders: list[Path], out: Path) -> Outcome:
    """Put the runs of several folders into a new one, and write a report of them.

    Args:
        folders: results of `reproduce`, such as shares of one grid or runs with different seeds.
        out: the new folder; it can be continued like any other.
    """
    stores = [Store(folder) for folder in folders]
    for store in stores:
        if not any(map(store.settings, EXPERIMENTS)):
            raise StoreError(f"{store.folder} has no results of {', '.join(EXPERIMENTS)}")
    having = {name: found for name in EXPERIMENTS if (found := [store for store in stores if store.settings(name)])}
    settings = {name: _common_settings(name, found) for name, found in having.items()}
    records = [record for name, found in having.items() for record in EXPERIMENTS[name].merged(found).items()]
    with open_store(out) as store:
        store.begin(settings, resume=False)
        for name, record in records:
            store.finish(name, record)
        return _write(store)


def _common_settings(name: str, stores: list[Store]) -> dict[str, Any]:
    """Return the settings of an experiment in all folders; raise if they differ in more than seeds and commands."""
    first, *others = (store.settings(name) for store in stores)
    for store, settings in zip(stores[1:], others, strict=True):
        keys = {*first, *settings} - {"command", "seeds", "first_seed"}
        if changed := sorted(key for key in keys if first.get(key) != settings.get(key)):
            changes = ", ".join(f"{key} is {first.get(key)!r} and {settings.get(key)!r}" for key in changed)
            raise StoreError(f"{name} in {stores[0].folder} and {store.folder} do not belong together: {changes}")
    if all((settings["seeds"], settings["first_seed"]) == (first["seeds"], first["first_seed"]) for settings in others):
        return first
    every = [first, *others]
    seeds = {settings["first_seed"] + k for settings in every for k in range(settings["seeds"])}
    commands = "; ".join(dict.fromkeys(settings["command"] for settings in every))
    return {**first, "command": commands, "seeds": len(seeds), "first_seed": min(seeds)}


def _write(store: Store) -> Outcome:
    """Write both files from all records in the folder, including those of earlier runs."""
    sections: list[Section] = []
    numbers: dict[str, Any] = {}
    for name, experiment in EXPERIMENTS.items():
        found = experiment.results(store)
        if found is not None:
            section, numbers[name] = found
            sections.append(section)
    if not sections:
        return Outcome([], None, None)
    numbers["claims"] = {section.name: [asdict(claim) for claim in section.claims] for section in sections}
    numbers["settings"] = {name: settings for name in EXPERIMENTS if (settings := store.settings(name))}
    return Outcome(
        sections,
        report=store.write("report.html", render(sections)),
        numbers=store.write("results.json", json.dumps(numbers, indent=1, allow_nan=False)),
    )
