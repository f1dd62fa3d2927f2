"""From a model and a target to a smaller model, in one call."""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils import _pytree as pytree

from proxmo import checks, shards
from proxmo.compaction import CompactionReport, compact, unit_groups
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.history import History
from proxmo.layers import ParamGroups
from proxmo.optim import AutoProxSGD, ProxOptimizer, ProxSGD
from proxmo.penalties import GroupL2, Trimmed
from proxmo.progress import Progress
from proxmo.targets import HOLD, KeepScheduler

SEARCH_STEPS = 7  # halvings in the search for the share of units that meets a budget
LATENCY_CALLS = 15


@dataclass(frozen=True)
class ShrinkReport:
    """What `shrink` did: sizes, speed and quality before and after. Prints as a table.

    >>> compaction = CompactionReport((1000, 250), (8000, 2000), {"hidden": (16, 4)}, 0.0, [])
    >>> print(ShrinkReport(0.25, (16, 4), compaction, (4300, 1300), (0.002, 0.001), None))
                 before  after
    units            16      4  0.25
    parameters    1,000    250  0.25
    file, bytes   4,300  1,300  0.30
    latency, ms   2.000  1.000  0.50
    """

    keep: float
    """The share of units that was requested, or that meets the budget."""
    units: tuple[int, int]
    """Number of removable units, before and after."""
    compaction: CompactionReport
    """The report of `compact`: widths of layers, multiply-adds, largest difference in outputs."""
    file_size: tuple[int, int]
    """Bytes of a file with the ``state_dict``, before and after."""
    latency: tuple[float, ...]
    """Median seconds of a call on the first batch, before and after, measured alternately."""
    score: tuple[float, float] | None
    """What ``evaluate`` returned for the model as it was given and for the small one."""
    history: History = field(default_factory=History, repr=False, compare=False)
    """The loss, ψ, zeros and units left during the run; ``plot.history(report)`` draws them."""

    def __str__(self) -> str:
        rows = [("", "before", "after", "")]
        for label, (before, after), form in (
            ("units", self.units, ",d"),
            ("parameters", self.compaction.parameters, ",d"),
            ("file, bytes", self.file_size, ",d"),
            ("latency, ms", tuple(1000 * seconds for seconds in self.latency), ".3f"),
        ):
            rows.append((label, format(before, form), format(after, form), f"{after / before:.2f}"))
        if self.score is not None:
            rows.append(("score", f"{self.score[0]:.4g}", f"{self.score[1]:.4g}", ""))
        first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
        return "\n".join(f"{a:{first}}  {b:>{second}}  {c:>{third}}  {d}".rstrip() for a, b, c, d in rows)


def shrink(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    loader: Iterable[tuple[Any, Any]],
    keep: float | None = None,
    *,
    epochs: int = 10,
    parameters: float | None = None,
    latency: float | None = None,
    optimizer: Callable[[ParamGroups], ProxOptimizer] = AutoProxSGD,
    evaluate: Callable[[nn.Module], float] | None = None,
    progress: bool = True,
) -> tuple[nn.Module, ShrinkReport]:
    """Train a model while its smallest units vanish, and return the smaller model.

    A unit is a neuron, a channel or an attention head. `shrink` finds the removable units (`unit_groups`), trains with
    a trimmed penalty that is ramped down to the target (`Trimmed`, `KeepScheduler`) and an lr that falls to zero along
    a cosine, and removes the zero units without changing the outputs (`compact`). You choose no strength and, with the
    default optimizer, no lr. The model that you pass is not modified.

    Args:
        model: the model, trained or not.
        loss: as in ``loss(model(inputs), targets)``.
        loader: batches (inputs, targets), iterated once before training and once per epoch; inputs are a tensor, a
            tuple of arguments or a dictionary of keyword arguments.
        keep: the share of units to keep in each layer, in (0, 1]; 0.25 if neither this nor a budget is given.
        epochs: the number of passes over the loader.
        parameters: a budget in place of ``keep``: the share of the model's parameters to keep.
        latency: a budget in place of ``keep``: the time of a call on the first batch as a share of the model's time. It
            is measured, so it is met as well as the machine allows.
        optimizer: a function from parameter groups to an optimizer whose ``step`` needs no closure. For transformers,
            use ``functools.partial(proxmo.ProxAdamW, lr=1e-3)`` with your AdamW lr.
        evaluate: a function from a model to a number to report, such as its accuracy; called in evaluation mode, before
            training and on the result.
        progress: show a progress line with the loss, the zeros and the units left; on terminals only, not in logs.

    Returns:
        The small model, in evaluation mode, and a report.

    >>> import torch, proxmo
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(256, 8)
    >>> y = x[:, :2].sum(1, keepdim=True)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    >>> batches = list(zip(x.split(32), y.split(32)))
    >>> small, report = shrink(model, torch.nn.functional.mse_loss, batches, keep=0.25, epochs=10)
    >>> small[0], report.units
    (Linear(in_features=8, out_features=8, bias=True), (32, 8))
    """
    budget = _Budget.of(keep, parameters, latency)
    epochs = checks.count("epochs", epochs, least=1)
    _check_functions(loss, evaluate)
    inputs, horizon = _first_inputs(loader), epochs * _length(loader)
    if horizon < 2:
        raise ValueError(f"loader and epochs must make at least 2 steps, got {horizon}")
    trained = copy.deepcopy(model).train()
    # Each family keeps the share: norms of different layers do not compare, least of all with normalisation between.
    groups = unit_groups(trained, inputs, Trimmed(GroupL2(1.0), 1.0, scope="each"))
    if len(groups) == 0 or groups[0]["penalty"] is None:
        raise ValueError("\n".join(["model must have units that can be removed, got none", *groups.notes]))
    training = _made_by(optimizer, groups)
    before = None if evaluate is None else _score(evaluate, copy.deepcopy(model).eval())
    share = budget.share_of_units(trained, groups, inputs)
    rates, target = CosineAnnealingLR(training, horizon), KeepScheduler(training, share, horizon)
    with Progress(horizon, "shrink", shown=progress) as bar:
        for batch in bar.over(batch for _ in range(epochs) for batch in loader):
            value = _backward(trained, training, loss, batch)
            bar.show(loss=value, zeros=partial(_describe_zeros, trained), units=partial(_describe_units, training))
            training.step()
            rates.step()
            target.step(value)
    small, compaction = compact(trained.eval(), inputs)
    dense = copy.deepcopy(model).eval()
    return small, ShrinkReport(
        share,
        _count_units(training),
        compaction,
        (_file_size(dense), _file_size(small)),
        _latencies([dense, small], inputs),
        None if evaluate is None or before is None else (before, _score(evaluate, small)),
        target.history,
    )


def _check_functions(loss: Any, evaluate: Any) -> None:
    if isinstance(loss, type) or not callable(loss):  # called, a class of losses would make an object
        raise TypeError(f"loss must be a function of outputs and targets, such as nn.MSELoss(), got {loss!r}")
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate must be a function from a model to a number, got {evaluate!r}")


def _score(evaluate: Callable[[nn.Module], float], model: nn.Module) -> float:
    found: Any = evaluate(model)
    if isinstance(found, (Tensor, np.ndarray)) and math.prod(found.shape) == 1:
        found = found.item()
    if not isinstance(found, Real):
        raise TypeError(f"evaluate must return a number, got {found!r}")
    return float(found)


def _made_by(make: Callable[[ParamGroups], ProxOptimizer], groups: ParamGroups) -> ProxOptimizer:
    takes = "a function from parameter groups to an optimizer of proxmo, such as partial(ProxAdamW, lr=1e-3)"
    if not callable(make):
        raise TypeError(f"optimizer must be {takes}, got {type(make).__name__}")
    optimizer = make(groups)
    if not isinstance(optimizer, ProxOptimizer):
        raise TypeError(f"optimizer must be {takes}, got one that makes {type(optimizer).__name__}")
    return optimizer


def _backward(model: nn.Module, optimizer: ProxOptimizer, loss: Callable[[Any, Any], Tensor], batch: Any) -> float:
    """Compute the gradients on a batch and return the loss."""
    inputs, targets = pytree.tree_map(partial(_to_device, device=next(model.parameters()).device), tuple(batch))
    optimizer.zero_grad()
    value = loss(ModelInputs.from_example(inputs).call(model), targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss must return a tensor with one element, such as a mean over samples, got {got}")
    value.backward()  # type: ignore[no-untyped-call]
    if not math.isfinite(found := value.item()):
        raise FloatingPointError(f"the loss has become {found}; a smaller lr may help")
    return found


def _to_device(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def _first_inputs(loader: Iterable[tuple[Any, Any]]) -> Any:
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TypeError(
            f"loader must give pairs (inputs, targets), such as a DataLoader or a list, got {type(loader).__name__}"
        )
    if iter(loader) is loader:
        raise TypeError("loader must be iterable more than once, such as a DataLoader or a list, got an iterator")
    for batch in loader:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(f"loader must give pairs (inputs, targets), got {type(batch).__name__}")
        return batch[0]
    raise ValueError("loader must have at least one batch, got an empty one")


def _length(loader: Iterable[Any]) -> int:
    return len(loader) if isinstance(loader, Sized) else sum(1 for _ in loader)


def _count_units(optimizer: ProxOptimizer) -> tuple[int, int]:
    """Return how many units there are, and how many are not zero."""
    families = [family for sparsity in optimizer.sparsity() for family in sparsity.families]
    units = sum(family.units for family in families)
    return units, units - sum(family.zero for family in families)


def _describe_units(optimizer: ProxOptimizer) -> str:
    units, left = _count_units(optimizer)
    return f"{left}/{units}"


def _describe_zeros(model: nn.Module) -> str:
    params = list(model.parameters())
    return f"{shards.count_zeros(params) / sum(p.numel() for p in params):.0%}"


def _file_size(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        return path.stat().st_size


@torch.no_grad()
def _latencies(models: Sequence[nn.Module], inputs: Any) -> tuple[float, ...]:
    """Return the median time of a call of each model, measured alternately."""
    device = next(models[0].parameters()).device
    call = ModelInputs.from_example(pytree.tree_map(partial(_to_device, device=device), inputs)).call
    times: list[list[float]] = [[] for _ in models]
    for turn in range(-2, LATENCY_CALLS):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            call(model)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken += [time.perf_counter() - start] if turn >= 0 else []
    return tuple(map(statistics.median, times))


class _Budget(NamedTuple):
    """What may be left of a model, as a share: of its units, of its parameters, or of the time of a call."""

    share: float
    measure: Callable[[nn.Module, nn.Module, Any], float] | None
    """Maps the dense model, the small one and inputs to the share that is left; ``None`` for units."""

    @classmethod
    def of(cls, keep: float | None, parameters: float | None, latency: float | None) -> _Budget:
        given = {"keep": keep, "parameters": parameters, "latency": latency}
        chosen = {name: value for name, value in given.items() if value is not None} or {"keep": 0.25}
        if len(chosen) > 1:
            raise ValueError(f"keep, parameters and latency exclude each other, got {chosen}")
        ((name, value),) = chosen.items()
        return cls(
            checks.share(name, value),
            {"keep": None, "parameters": _share_of_parameters, "latency": _share_of_latency}[name],
        )

    def share_of_units(self, model: nn.Module, groups: ParamGroups, inputs: Any) -> float:
        """Return the share of units to keep, found by halving: each trial removes the smallest units of a copy."""
        if self.measure is None or self.share == 1:
            return self.share
        low, high = 0.0, 1.0
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            trial = _without_smallest_units(model, groups, middle, inputs)
            low, high = (middle, high) if self.measure(model, trial, inputs) <= self.share else (low, middle)
        if low == 0:
            raise ValueError(
                f"no share of units meets the budget of {self.share}: layers without removable units alone exceed it"
            )
        return low


def _without_smallest_units(model: nn.Module, groups: ParamGroups, share: float, inputs: Any) -> nn.Module:
    """Return a copy of the model that keeps a share of its units, those of largest norm."""
    twin = copy.deepcopy(model).eval()
    own = groups.on(twin)
    for group in own:
        group["penalty"] = group["penalty"] and Trimmed(GroupL2(HOLD), share, scope="each")
    optimizer = ProxSGD(own, lr=1.0)
    for p in twin.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return compact(twin, inputs)[0]


def _share_of_parameters(dense: nn.Module, small: nn.Module, inputs: Any) -> float:
    return sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in dense.parameters())


def _share_of_latency(dense: nn.Module, small: nn.Module, inputs: Any) -> float:
    was_training = dense.training
    before, after = _latencies([dense.eval(), small.eval()], inputs)
    dense.train(was_training)
    return after / before
