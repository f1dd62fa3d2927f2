"""Set the sizes that a user's modules keep as numbers, such as ``num_heads``, and prove the result by running it.

After a cut, the model runs, and every module must return what it did before, without the units. The first that does not
has a number that is out of date. Its attributes, and then those of the modules around it, that are equal to a size that
changed there are candidates; sets of them are tried, small ones first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from proxmo.compaction.analysis import Analysis
from proxmo.compaction.cutting import Removal, removed_atoms
from proxmo.compaction.example_inputs import ModelInputs, output_tensors
from proxmo.compaction.labels import WILD, Facts, Labels
from proxmo.compaction.norms import precision_of_norms, rescale_norms
from proxmo.compaction.outputs import are_close
from proxmo.compaction.tracer import unscripted_modules

_MOST_TRIALS = 60
_LARGEST_SET = 4

Setting = tuple[str, str]
"""A module, and the path of an attribute, such as ``num_heads`` or ``config.num_heads``."""


class DeviatesError(Exception):
    """Raised where a module does not return what it should."""


class _RefuseAttentionWithoutHeads(TorchFunctionMode):
    """Raise where torch 2.9 and older end the process by a division by zero: attention without a key or value head.

    Models get there in a trial, while the numbers by which they slice a joint projection are out of date.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if not all(tensor.numel() for tensor in tensors):
                raise RuntimeError("attention has no heads")
        return func(*args, **kwargs)


@dataclass
class Run:
    """How far a call of the smaller model got."""

    steps: int
    """How often a module was entered, or returned what it should."""
    failed: str | None
    """The module that did not, or ``None``."""
    reason: str = ""


class Undo(NamedTuple):
    """How to take back that an attribute was set."""

    module: nn.Module
    path: str
    old: int
    setting: Setting
    before: tuple[float, float] | None
    """What an earlier step noted for it: an attribute may be set twice."""


@dataclass
class AttributeSearch:
    """Finds the attributes to set.

    Args:
        small: the model after the cut; its attributes are set in place.
        analysis: what is known of the model before.
        removals: what was cut.
        inputs: the arguments of the first call of the analysis.
    """

    small: nn.Module
    analysis: Analysis
    removals: list[Removal]
    inputs: ModelInputs
    changes: dict[Setting, tuple[float, float]] = field(default_factory=dict)
    """The attributes that were set, with their old and new values."""

    def __post_init__(self) -> None:
        self._removed = removed_atoms(self.analysis, self.removals)
        self.precision = precision_of_norms(self.analysis, self._removed)
        self.changes |= rescale_norms(self.small, self.analysis, self._removed)
        self._sizes: dict[str, dict[int, int]] = {}
        self._kept_sizes: dict[str, set[int]] = {}
        self._find_sizes()
        self._expected: dict[str, list[list[Tensor | None]]] = {}
        trace = self.analysis.traces[0]
        for name, outputs in trace.module_outputs:
            # what has no effect on the outputs of the model may change, such as the mean of the weights of attention
            needed = [source < 0 or trace.live[source] for _, _, source in outputs]
            reduced = [
                self._reduced(*output[:2]) if keep else None for output, keep in zip(outputs, needed, strict=True)
            ]
            self._expected.setdefault(name, []).append(reduced)

    def run(self) -> str | None:
        """Set attributes until the model runs as it should; return the reason if it does not."""
        state = self._try_run()
        while state.failed is not None:
            better = self._improve(state)
            if better is None:
                return state.reason
            state = better
        return None

    def _improve(self, state: Run) -> Run | None:
        """Set attributes so that the model gets further than before; return ``None`` if none are found."""
        assert state.failed is not None
        parts = state.failed.split(".") if state.failed else []
        trials = 0
        for end in range(len(parts), -1, -1):
            where = ".".join(parts[:end])
            paths = list(self._candidates(where, state.failed))
            for size in range(1, min(len(paths), _LARGEST_SET) + 1):
                for chosen in combinations(paths, size):
                    trials += 1
                    if trials > _MOST_TRIALS:
                        return None
                    undo = self._set_alike(where, chosen, state.failed)
                    reached = self._try_run()
                    if reached.failed is None or reached.steps > state.steps:
                        return reached
                    self._undo(undo)
        return None

    def _candidates(self, where: str, failed: str) -> Iterator[str]:
        """Yield the attributes of a module that are equal to a size that changed."""
        module = self.small.get_submodule(where)
        sizes = self._sizes.get(where, {}) | self._sizes.get(failed, {})
        for path, value in _numbers(module):
            if value in sizes:
                yield path

    def _set_alike(self, where: str, paths: tuple[str, ...], failed: str) -> list[Undo]:
        """Set attributes of a module, and of all others of its class where these sizes changed."""
        first = self.small.get_submodule(where)
        undo = []
        for name, module in self.small.named_modules():
            if type(module) is not type(first):
                continue
            if name == where:
                sizes = self._sizes.get(name, {}) | self._sizes.get(failed, {})
            else:  # elsewhere, a size that an axis keeps may be meant
                kept = self._kept_sizes.get(name, set())
                sizes = {old: new for old, new in self._sizes.get(name, {}).items() if old not in kept}
            numbers = dict(_numbers(module))
            for path in paths:
                old = numbers.get(path)
                if old is None or old not in sizes:
                    continue
                before = self.changes.get((name, path))
                undo.append(Undo(module, path, old, (name, path), before))
                set_number(module, path, sizes[old])
                self.changes[name, path] = (old if before is None else before[0], sizes[old])
        return undo

    def _undo(self, undo: list[Undo]) -> None:
        for module, path, old, setting, before in undo:
            set_number(module, path, old)
            if before is None:
                del self.changes[setting]
            else:
                self.changes[setting] = before

    def _try_run(self) -> Run:
        """Call the smaller model, and compare what its modules return."""
        steps = 0
        stack: list[str] = []
        seen: dict[str, int] = {}

        def enter(name: str) -> None:
            nonlocal steps
            stack.append(name)
            steps += 1

        def leave(name: str, outputs: Any) -> None:
            nonlocal steps
            number = seen[name] = seen.get(name, -1) + 1
            expected = self._expected.get(name, [])
            if number < len(expected) and not _agree(output_tensors(outputs), expected[number], self.precision):
                raise DeviatesError("removal changes the outputs")
            stack.pop()
            steps += 1

        with ExitStack() as hooks, torch.no_grad(), _RefuseAttentionWithoutHeads():
            for name, module in unscripted_modules(self.small):
                before = module.register_forward_pre_hook(lambda m, i, name=name: enter(name), prepend=True)
                after = module.register_forward_hook(lambda m, i, o, name=name: leave(name, o))
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            try:
                self.inputs.call(self.small)
            except DeviatesError as error:
                return Run(steps, stack[-1], str(error))
            except Exception as error:
                reason = f"the pruned model does not run: {type(error).__name__}: {error}"
                return Run(steps, stack[-1] if stack else "", reason)
        return Run(steps, None)

    def _reduced(self, tensor: Tensor, facts: Facts) -> Tensor:
        """Return a tensor without the units."""
        for axis, labels in enumerate(facts.labels):
            gone = self._is_removed(labels)
            if gone.any():
                kept = torch.from_numpy(np.flatnonzero(~gone)).to(tensor.device)
                tensor = tensor.index_select(axis, kept)
        return tensor

    def _is_removed(self, labels: Labels) -> Any:
        return (labels >= 0) & self._removed[np.maximum(labels, 0)]

    def _find_sizes(self) -> None:
        """Find for each module the sizes of axes in its operations that change, and those that stay."""
        for operation in self.analysis.traces[0].operations:
            for labels in [labels for result in operation.results for labels in result if (labels >= 0).any()]:
                gone = int(self._is_removed(labels).sum())
                if gone:
                    self._sizes.setdefault(operation.module, {}).setdefault(len(labels), len(labels) - gone)
                else:
                    self._kept_sizes.setdefault(operation.module, set()).add(len(labels))


def _has_free_axis(facts: Facts) -> bool:
    """Return whether a tensor has an axis whose size is not known after the cut."""
    return any((labels == WILD).any() and len(labels) > 1 for labels in facts.labels)


def _agree(actual: list[Tensor], expected: list[Tensor | None], precision: torch.dtype | None) -> bool:
    if len(actual) != len(expected):
        return False
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if b is not None]
    return are_close([a for a, _ in pairs], [b for _, b in pairs], precision)


def _numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers among the attributes of a module, and of objects such as its ``config``."""
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if type(value) is int:
            yield name, value
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type)) and not callable(value):
            for inner, number in vars(value).items():
                if type(number) is int and not inner.startswith("_"):
                    yield f"{name}.{inner}", number


def set_number(module: nn.Module, path: str, value: float) -> None:
    """Set an attribute of a module, or of a copy of an object such as its ``config`` that others may share."""
    name, _, inner = path.partition(".")
    if not inner:
        setattr(module, name, value)
        return
    own = copy.copy(getattr(module, name))
    setattr(own, inner, value)
    setattr(module, name, own)
