"""Run experiments into a folder, and write a report of everything in that folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeAlias

from proxmo.experiments.experiment import Experiment, Options
from proxmo.experiments.proxy import Proxy
from proxmo.experiments.regularized import Regularized
from proxmo.experiments.report import Section, render
from proxmo.experiments.seeds import as_range
from proxmo.experiments.store import FREE, Store, StoreError, disk_errors, open_store
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
    """The sections of the report, and what was written."""

    sections: list[Section]
    report: Path | None
    """The page; ``None`` as long as no experiment is complete."""
    numbers: Path | None
    """The numbers behind the page."""
    missing: list[str]
    """The names of runs that were asked for and are not there; further seeds are known only after the whole grid."""
    commands: list[str]
    """What trains them with ``--resume``, unless they are of folders with different seeds."""


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
        out: the new folder. If only shares were merged, it can be continued like any other.
    """
    stores = [Store(folder) for folder in folders]
    for store in stores:
        if not store.folder.is_dir():
            raise StoreError(f"{store.folder} is not a folder")
        if not any(map(store.settings, EXPERIMENTS)):
            raise StoreError(f"{store.folder} has no results of {', '.join(EXPERIMENTS)}")
    settings: dict[str, dict[str, Any]] = {}
    records: dict[str, Any] = {}
    for name, experiment in EXPERIMENTS.items():
        if asked := [store for store in stores if store.settings(name)]:
            having = [store for store in asked if store.has_results(name)]
            if not having:
                raise StoreError(f"{name} was started in {asked[0].folder}, but no folder has a result")
            try:
                settings[name] = _common_settings(name, having)
                if not settings[name]["seeds"]:
                    raise ValueError("no seeds")
                records |= experiment.merged(having, settings[name])
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise StoreError(f"the settings of {name} are damaged or of another version: {error!r}") from error
    with _new_folder(out) as folder, open_store(folder) as store:
        store.begin(settings, resume=False)
        for name, record in records.items():
            store.finish(name, record)
        outcome = _write(store)
    assert outcome.report is not None  # merged experiments are complete
    assert outcome.numbers is not None
    return replace(outcome, report=out / outcome.report.name, numbers=out / outcome.numbers.name)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``path`` if the block ends without an error."""
    if path.exists():
        raise StoreError(f"{path} exists already; choose another --out, or delete it")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent)
    with temporary as parent:
        folder = Path(parent) / path.name
        with disk_errors(path):
            folder.mkdir()
        yield folder
        with disk_errors(path):
            folder.rename(path)


def _common_settings(name: str, stores: list[Store]) -> dict[str, Any]:
    """Return the settings of an experiment in all folders; raise if they differ in more than seeds and commands."""
    first, *others = (store.settings(name) or {} for store in stores)
    for store, settings in zip(stores[1:], others, strict=True):
        keys = {*first, *settings} - FREE - {"seeds"}
        if changed := sorted(key for key in keys if first.get(key) != settings.get(key)):
            changes = ", ".join(f"{key} is {first.get(key)!r} and {settings.get(key)!r}" for key in changed)
            raise StoreError(f"{name} in {stores[0].folder} and {store.folder} do not belong together: {changes}")
    if all(settings["seeds"] == first["seeds"] for settings in others):
        return first
    every = [first, *others]
    commands = dict.fromkeys(command for settings in every for command in settings["command"].split("; "))
    ranges = sorted(
        {text for settings in every for text in settings["seeds"]},
        key=lambda text: (as_range(text).start, as_range(text).stop),
    )
    for one, other in pairwise(ranges):
        if as_range(one).start == as_range(other).start:
            raise StoreError(f"{name} was started for the seeds {one} and for {other}; merge only one of them")
    return {**first, "command": "; ".join(commands), "seeds": ranges}


def _write(store: Store) -> Outcome:
    """Write both files from all records in the folder, including those of earlier runs."""
    sections: list[Section] = []
    numbers: dict[str, Any] = {}
    settings = {name: found for name in EXPERIMENTS if (found := store.settings(name))}
    missing = {name: EXPERIMENTS[name].missing(store) for name in settings}
    commands = [settings[name]["command"] for name in settings if missing[name] and len(settings[name]["seeds"]) == 1]
    unfinished = (list(chain(*missing.values())), commands)
    for name, experiment in EXPERIMENTS.items():
        found = experiment.results(store)
        if found is not None:
            section, numbers[name] = found
            sections.append(section)
    if not sections:
        return Outcome([], None, None, *unfinished)
    numbers["claims"] = {section.name: [asdict(claim) for claim in section.claims] for section in sections}
    numbers["settings"] = settings
    report = store.write("report.html", render(sections))
    return Outcome(
        sections, report, store.write("results.json", json.dumps(numbers, indent=1, allow_nan=False)), *unfinished
    )
