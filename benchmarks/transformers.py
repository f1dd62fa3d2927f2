"""Measure what it costs and saves to remove heads and neurons: `python -m benchmarks.transformers quality` or `speed`.

``quality`` trains a byte-level transformer to a share of its heads and neurons in several ways, compacts it, and
compares losses on held-out text. Each method has an lr of its own: the best of three with another seed. Every run
writes a record to the folder of results. Records that are there are not run again, so that it can be stopped and
resumed. ``speed`` times this transformer and a BERT of base width with four layers, dense and compacted by turns. It
needs an idle machine, and transformers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks import require
from benchmarks.adaptive_methods import Model, Point, dense, gradual, trimmed, trimmed_block
from benchmarks.output import GREY, write
from benchmarks.records import perform_missing, read
from benchmarks.targets_methods import REFIT, Blocks, Job
from benchmarks.targets_report import Look, Looks
from benchmarks.targets_tasks import CONTEXT, TASKS, ByteTransformer, Folders, Task
from benchmarks.timing import by_turns, threads
from proxmo import CompactionReport, GroupL2, compact, unit_groups
from proxmo.experiments.threads import one_thread

STEPS = 800
KEEP = (0.5, 0.25, 0.1)
MIDDLE = 0.25
LRS = (3e-3, 1e-2, 3e-2)
CHOICE_SEED = 100  # lr is chosen with it
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
LOOKS: Looks = {
    "dense": Look("dense AdamW", "black"),
    "trimmed": Look("trimmed ProxAdamW", "#D55E00", "o"),
    "trimmed-block": Look("trimmed ProxAdamW, metric by block", "#CC79A7", "o"),
    "gradual": Look("AdamW, gradual pruning", "#0072B2", "s"),
    "one-shot": Look("AdamW, one-shot pruning", "#009E73", "v"),
}


def one_shot(job: Job) -> list[Point]:
    """AdamW; after most of the steps the smallest units become zero and stay so, and the others are trained on."""
    model = Model(job)
    cut = round(REFIT * job.task.steps)
    alive: list[Tensor] = []

    @torch.no_grad()
    def after_step(step: int) -> None:
        if step == cut:
            model.blocks.keep_largest(job.keep)
            alive.extend(p != 0 for p in model.blocks.weights())
        for p, mask in zip(model.blocks.weights(), alive, strict=False):
            p.mul_(mask)

    return [model.fit(model.adamw(), after_step)]


METHODS: dict[str, Callable[[Job], list[Point]]] = {
    "dense": dense,
    "trimmed": trimmed,
    "trimmed-block": trimmed_block,
    "gradual": gradual,
    "one-shot": one_shot,
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    method: str
    keep: float
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.method}, keep {self.keep:g}, lr {self.lr:g}, seed {self.seed}"

    def path(self, out: Path) -> Path:
        return out / "records" / f"{self.method}-{self.keep:g}-{self.lr:g}-{self.seed}.json"


@dataclass(frozen=True)
class Record(Run):
    """A run with what came out."""

    loss: float
    """On held-out text, of the network with zeros."""
    small_loss: float
    """Of the compacted network."""
    parameters: tuple[int, int]
    widths: dict[str, tuple[int, int]]
    """Heads and neurons of each layer, before and after."""
    seconds: float

    def summary(self) -> str:
        return f"loss {self.loss:.4f}, compacted {self.small_loss:.4f}, {self.parameters[1]} parameters"


@dataclass
class CompactedScore:
    """The loss of a network of a task, which also compacts it and keeps the report."""

    task: Task
    small_loss: float = 0.0
    report: CompactionReport | None = field(default=None, repr=False)

    def __call__(self, network: nn.Module) -> float:
        small, self.report = compact(network, self.task.example)
        self.small_loss = self.task.score(small)
        return self.task.score(network)


def perform(run: Run, task: Task) -> Record:
    """Train, compact, and return the record."""
    score = CompactedScore(task)
    job = Job(replace(task, lr=run.lr, exclude=(), score=score), "units", 1 - run.keep, run.seed)
    start = time.perf_counter()
    (point,) = METHODS[run.method](job)
    assert score.report is not None
    widths = {name: sizes for name, sizes in score.report.widths.items() if name.endswith(("attention", "inner"))}
    seconds = time.perf_counter() - start
    return Record(
        **asdict(run),
        loss=point.score,
        small_loss=score.small_loss,
        parameters=score.report.parameters,
        widths=widths,
        seconds=seconds,
    )


def choices(method: str) -> list[Run]:
    """Return the runs among which lr is chosen."""
    return [Run(method, 1.0 if method == "dense" else MIDDLE, lr, CHOICE_SEED) for lr in LRS]


def grid(seeds: int, out: Path) -> Iterator[Run]:
    """Yield the runs of all methods whose lr is chosen."""
    for seed in range(seeds):
        for method in METHODS:
            tried = [record for run in choices(method) if (record := read(run.path(out), Record)) is not None]
            if len(tried) == len(LRS):
                lr = min(tried, key=lambda record: record.loss).lr
                yield from (Run(method, keep, lr, seed) for keep in ((1.0,) if method == "dense" else KEEP))


def train_missing(out: Path, seeds: int, steps: int) -> None:
    """Choose the lr of each method, then train what has no record yet."""
    task = replace(TASKS["bytes-transformer"](Folders()), steps=steps)
    perform_missing([run for method in METHODS for run in choices(method)], out, partial(perform, task=task))
    perform_missing(list(grid(seeds, out)), out, partial(perform, task=task))


def quality(out: Path, seeds: int) -> None:
    """Write the table and the figure of losses from the records that are there."""
    records = [record for run in grid(seeds, out) if (record := read(run.path(out), Record)) is not None]
    if not records:
        raise SystemExit(f"no records in {out}")
    cells: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        cells.setdefault((record.method, record.keep), []).append(record)
    write(
        out,
        "quality",
        [asdict(record) for record in records],
        _draw_losses(cells),
        ("kept", "method", "lr", "seeds", "heads", "neurons", "parameters", "loss", "loss, compacted"),
        [_row(*cell) for cell in sorted(cells.items(), key=lambda cell: -cell[0][1])],
    )


def _row(key: tuple[str, float], records: list[Record]) -> tuple[str, ...]:
    method, keep = key
    first = records[0]
    heads, neurons = (
        " + ".join(str(after) for name, (_, after) in first.widths.items() if name.endswith(kind))
        for kind in ("attention", "inner")
    )
    losses = [_mean([r.loss for r in records]), _mean([r.small_loss for r in records])]
    start = (f"{keep:.0%}", LOOKS[method].label, f"{first.lr:g}", str(len(records)))
    return *start, heads, neurons, f"{first.parameters[1]:,}", *losses


def _mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _draw_losses(cells: dict[tuple[str, float], list[Record]]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for place, (method, look) in enumerate(LOOKS.items()):
        found = {keep: [r.small_loss for r in cells[method, keep]] for keep in (1.0, *KEEP) if (method, keep) in cells}
        means = [statistics.mean(losses) for losses in found.values()]
        if method == "dense" and means:
            axes.axhline(means[0], color=look.colour, linestyle="--", linewidth=1, label=look.label)
            continue
        spread = [statistics.stdev(losses) if len(losses) > 1 else 0.0 for losses in found.values()]
        apart = 1 + 0.02 * (place - 2)  # so that error bars do not hide one another
        axes.errorbar([apart * keep for keep in found], means, spread, color=look.colour, marker=look.marker,
                      capsize=2, label=look.label)  # fmt: skip
    axes.set(xscale="log", xlabel="heads and neurons kept", ylabel="held-out loss, compacted")
    axes.set_xticks(KEEP, [f"{keep:.0%}" for keep in KEEP])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


@dataclass(frozen=True)
class Setting:
    """A model to time, on inputs of several sizes."""

    name: str
    make: Callable[[], nn.Module]
    vocabulary: int
    sizes: tuple[tuple[int, int], ...]
    """Samples and tokens of each."""
    example_size: tuple[int, int]
    """To find units with: the smallest that tells what belongs together."""

    def tokens(self, size: tuple[int, int]) -> Tensor:
        return torch.randint(self.vocabulary, size, generator=torch.Generator().manual_seed(0))


def bert() -> nn.Module:
    """Return a BERT of base width with four layers, random weights and a small vocabulary, which costs no time."""
    require("transformers")
    from transformers import BertConfig, BertModel

    model: nn.Module = BertModel(BertConfig(num_hidden_layers=4, vocab_size=1000))
    return model


SETTINGS = (
    Setting("byte transformer", ByteTransformer, 256, ((8, CONTEXT),), (2, CONTEXT)),
    Setting("BERT, 4 layers of base width", bert, 1000, ((1, 128), (8, 128)), (2, 8)),
)


def compacted(model: nn.Module, tokens: Tensor, share: float) -> tuple[nn.Module, CompactionReport]:
    """Return the model with a share of the heads and neurons of each layer, at least one."""
    blocks = Blocks("units", unit_groups(model, tokens, GroupL2(1.0)))
    blocks.narrow([max(1, round(share * total)) for total, _ in blocks.left()])
    return compact(model, tokens)


@dataclass(frozen=True)
class Timing:
    """The time of one call of a model."""

    model: str
    batch: int
    length: int
    threads: int
    kept: float
    parameters: int
    seconds: float
    dense_seconds: float

    def row(self) -> tuple[str, ...]:
        rate = self.batch * self.length / self.seconds
        return (
            *(self.model, f"{self.batch} x {self.length}", str(self.threads), f"{self.kept:.0%}"),
            *(f"{self.parameters:,}", f"{1e3 * self.seconds:.3g}", f"{rate:,.0f}"),
            f"{self.dense_seconds / self.seconds:.2f}",
        )


def timings(setting: Setting, repeats: int, thread_counts: list[int]) -> Iterator[Timing]:
    """Time the dense and the compacted models of a setting by turns."""
    torch.manual_seed(0)
    dense_model = setting.make().eval()
    made = {1.0: (dense_model, sum(p.numel() for p in dense_model.parameters()))}
    for share in SHARES[1:]:
        torch.manual_seed(0)
        small, report = compacted(setting.make().eval(), setting.tokens(setting.example_size), share)
        made[share] = small, report.parameters[1]
    for size, count in itertools.product(setting.sizes, thread_counts):
        with threads(count), torch.inference_mode():
            calls = {f"{share:g}": partial(model, setting.tokens(size)) for share, (model, _) in made.items()}
            seconds = by_turns(calls, repeats, max_seconds=60.0)
        for share, (_, parameters) in made.items():
            yield Timing(setting.name, *size, count, share, parameters, seconds[f"{share:g}"], seconds["1"])


def speed(out: Path, repeats: int, thread_counts: list[int]) -> None:
    """Time all settings, and write the table and the figure."""
    found = [timing for setting in SETTINGS for timing in timings(setting, repeats, thread_counts)]
    write(
        out,
        "speed",
        [asdict(timing) for timing in found],
        _draw_times(found),
        ("model", "tokens", "threads", "kept", "parameters", "ms", "tokens per second", "times faster"),
        [timing.row() for timing in found],
    )


def _draw_times(found: list[Timing]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for key in dict.fromkeys((t.model, t.batch, t.length, t.threads) for t in found):
        mine = [t for t in found if (t.model, t.batch, t.length, t.threads) == key]
        name, batch, length, count = key
        label = f"{name}, {batch} x {length} tokens, {count} thread{'s' * (count > 1)}"
        axes.plot([t.kept for t in mine], [t.seconds / t.dense_seconds for t in mine], marker="o", label=label)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1, label="proportional")
    axes.set(xlabel="heads and neurons kept", ylabel="time, dense = 1", xlim=(0, 1.05), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["quality", "speed"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of quality")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the records of quality")
    parser.add_argument("--repeats", type=int, default=20, help="timings per model of speed")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads of speed")
    parser.add_argument("--out", type=Path, default=Path("results/transformers"))
    options = parser.parse_args(arguments)
    if options.part == "quality":
        if not options.report_only:
            train_missing(options.out, options.seeds, options.steps)
        quality(options.out, options.seeds)
    else:
        speed(options.out, options.repeats, options.threads)


if __name__ == "__main__":
    main()
