"""Follow a call of a model operation by operation, and record what each says about units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from proxmo.compaction.aliases import Entry, View
from proxmo.compaction.calls import Call, bind_arguments, operator_name
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.example_inputs import ModelInputs, output_tensors
from proxmo.compaction.labels import Facts, Labels, Operation, Values, atoms_in, tensors_in, without_units
from proxmo.compaction.rules import not_understood, rule_for
from proxmo.compaction.splits import Splits

_DECIDING = frozenset({"_local_scalar_dense", "is_nonzero", "equal"})
_OUTPUT = "it is an output of the model"


class ModelAtoms:
    """The atoms of a model: one for each index along each axis of each parameter and buffer."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.starts: dict[tuple[str, int], int] = {}
        self.size = 0
        for name, tensor in self.tensors.items():
            for axis, length in enumerate(tensor.shape):
                self.starts[name, axis] = self.size
                self.size += length

    def labels(self) -> dict[str, tuple[Labels, ...]]:
        """Return the labels of all axes of each tensor of the model."""
        return {
            name: tuple(
                np.arange(length, dtype=np.int64) + self.starts[name, axis] for axis, length in enumerate(tensor.shape)
            )
            for name, tensor in self.tensors.items()
        }


@dataclass
class Trace:
    """What was recorded in one call of the model."""

    operations: list[Operation] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Parameters and buffers that the call used."""
    called: list[str] = field(default_factory=list)
    """Modules that were called, as often as they were."""
    module_outputs: list[tuple[str, list[tuple[Tensor, Facts, int]]]] = field(default_factory=list)
    """For each call of a module its name, and its outputs with their facts and the operation they come from."""
    outputs: list[int] = field(default_factory=list)
    """The operations that outputs of the model come from."""

    @cached_property
    def live(self) -> npt.NDArray[np.bool_]:
        """Which operations have an effect on outputs, or on what Python does."""
        live = np.zeros(len(self.operations), dtype=bool)
        live[self.outputs] = True
        for k in range(len(self.operations) - 1, -1, -1):
            live[k] |= self.operations[k].decides
            if live[k]:
                live[[operand.source for operand in self.operations[k].operands if operand.source >= 0]] = True
        return live

    def live_operations(self) -> list[Operation]:
        return [operation for operation, alive in zip(self.operations, self.live, strict=True) if alive]


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that carries facts along with all tensors of a call.

    Args:
        model: the model, in evaluation mode.
        labels: those of its parameters and buffers.
        splits: the choices where axes are split.
        constants: the constants of its parameters and buffers, if zeros matter.
        keep_outputs: whether to keep what all modules return.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: dict[str, tuple[Labels, ...]],
        splits: Splits,
        constants: dict[str, tuple[Values | None, ...]],
        *,
        keep_outputs: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._model, self._splits, self._keep_outputs = model, splits, keep_outputs
        self._entries: dict[int, Entry] = {}
        self._names: dict[int, str] = {}
        self._by_memory: dict[tuple[int, torch.Size], Entry] = {}
        self._stack: list[tuple[str, nn.Module]] = []
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            known = constants.get(name, (None,) * tensor.dim())
            entry = Entry(tensor, Facts(labels[name], known, False), -1, name)
            self._entries[id(tensor)] = entry
            self._names[id(tensor)] = name
            self._by_memory[tensor.data_ptr(), tensor.shape] = entry

    def run(self, inputs: ModelInputs) -> Trace:
        """Call the model and return what was recorded."""
        for number, tensor in enumerate(tensors_in([inputs.args, inputs.kwargs])):
            facts = without_units(tensor.shape, varies=True)
            self._entries[id(tensor)] = Entry(tensor, facts, -1, f"input {number}")
        with torch.no_grad(), self._hooks():
            try:
                with self:
                    outputs = inputs.call(self._model)
            except Exception as error:
                raise CompactionError(f"the model cannot be traced: {type(error).__name__}: {error}") from error
            end = Operation("output", "", [])
            for tensor in output_tensors(outputs):
                entry = self._entry(tensor)
                end.operands.append(entry.as_operand())
                for labels in entry.facts.labels:
                    end.block(labels, _OUTPUT)
            self.trace.operations.append(end)
            self.trace.outputs = [len(self.trace.operations) - 1]
        return self.trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_for(func)
        operands = [self._entry(tensor) for tensor in tensors_in([args, kwargs])]
        if rule is None and not all(entry.facts.is_fixed for entry in operands):
            decomposed = self._decomposed(func, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        self._record(func, rule or not_understood, bind_arguments(func, args, kwargs), out, operands)
        return out

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as the operations that torch says it is made of; return ``NotImplemented`` if unknown."""
        recorded = len(self.trace.operations)
        with self:
            try:
                if func in decomposition_table:
                    return decomposition_table[func](*args, **kwargs)
                return func.decompose(*args, **kwargs)
            except Exception:
                del self.trace.operations[recorded:]
                return NotImplemented

    def _record(self, func: Any, rule: Any, arguments: dict[str, Any], out: Any, operands: list[Entry]) -> None:
        name = operator_name(func)
        module_name, module = self._stack[-1] if self._stack else ("", self._model)
        operation = Operation(name.strip("_"), module_name, [entry.as_operand() for entry in operands])
        operation.arguments = {key: value for key, value in arguments.items() if not tensors_in(value)}
        index = len(self.trace.operations)
        self.trace.operations.append(operation)
        operation.decides = name in _DECIDING and any(entry.facts.varies for entry in operands)
        results = tensors_in(out)
        call = Call(func, arguments, results, operation, self._facts, self._splits, module)
        facts = self._apply(rule, call)
        self._record_made(operation, operands, facts)
        operation.results = [some.labels for some in facts]
        written = _written_tensors(func, arguments)
        shows = None if written else _shown_tensor(func, arguments, operands)
        starts = _starts(results, arguments) if shows is not None else []
        for position, (tensor, some) in enumerate(zip(results, facts, strict=True)):
            if any(tensor is other for other in written):
                entry = self._entry(tensor)
                if entry.facts.shape != some.shape:  # such as transpose_
                    self._entries[id(tensor)] = Entry(tensor, some, index)
                else:
                    entry.write(some, index, operation, self._splits)
                continue
            entry = Entry(tensor, some, index, position=position)
            if shows is not None:
                derive = self._derivation(call, rule, position)
                entry.view = View(shows, func, arguments, position, starts[position], derive, shows.version)
            self._entries[id(tensor)] = entry
        for tensor in written:
            if not any(tensor is result for result in results):
                self._entry(tensor).write(without_units(tensor.shape, varies=True), index, operation, self._splits)

    def _apply(self, rule: Any, call: Call) -> list[Facts]:
        try:
            facts: list[Facts] = rule(call)
        except Exception:  # a use of the operator that its rule does not foresee
            return not_understood(call)
        if [some.shape for some in facts] != [tuple(tensor.shape) for tensor in call.results]:
            return not_understood(call)
        return facts

    def _derivation(self, call: Call, rule: Any, position: int) -> Any:
        def derive(facts: Facts) -> Facts:
            again = Call(
                call.func, call.arguments, call.results, call.operation, lambda _: facts, call.splits, call.module
            )
            return self._apply(rule, again)[position]

        return derive

    def _record_made(self, operation: Operation, operands: list[Entry], results: list[Facts]) -> None:
        """Record what of the parameters among the operands makes units, rather than reads them."""
        if any(facts.varies for facts in results):
            parameters = [entry for entry in operands if not entry.facts.varies]
            atoms = [atoms_in(labels) for entry in parameters for labels in entry.facts.labels]
            operation.made += [some for some in atoms if len(some)]

    def _facts(self, tensor: Tensor) -> Facts:
        return self._entry(tensor).facts

    def _entry(self, tensor: Tensor) -> Entry:
        """Return what is known of a tensor; one that was never seen may depend on the inputs."""
        entry = self._entries.get(id(tensor))
        if entry is None:
            entry = self._by_memory.get((tensor.data_ptr(), tensor.shape))  # such as parameter.data
            if entry is None or tensor.numel() == 0:
                entry = Entry(tensor, without_units(tensor.shape, varies=True), -1)
            self._entries[id(tensor)] = Entry(tensor, entry.facts, entry.source, entry.name)
            return self._entries[id(tensor)]
        if id(tensor) in self._names:
            self.trace.used.add(self._names[id(tensor)])
        return entry.refresh()

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Register hooks that know which module runs."""
        with ExitStack() as stack:
            for name, module in unscripted_modules(self._model):
                for hook in self._hooks_for(name, module):
                    stack.callback(hook.remove)
            yield

    def _hooks_for(self, name: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, *_: Any) -> None:
            self._stack.append((name, module))
            self.trace.called.append(name)

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._stack.pop()
            if not self._keep_outputs:
                return
            entries = [self._entry(tensor) for tensor in output_tensors(outputs)]
            with _disable_current_modes():
                copies = [(entry.tensor.detach().clone(), entry.facts, entry.source) for entry in entries]
            self.trace.module_outputs.append((name, copies))

        return [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave),
        ]


def unscripted_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that take hooks."""
    return [(name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)]


def _written_tensors(func: Any, arguments: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes to."""
    if not func._schema.is_mutable or "batch_norm" in func._schema.name:
        return []
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [tensor for name in written for tensor in tensors_in(arguments[name])]


def _shown_tensor(func: Any, arguments: dict[str, Any], operands: list[Entry]) -> Entry | None:
    """Return the tensor whose memory the results of an operator show, if they do."""
    returns = func._schema.returns
    return operands[0] if returns and returns[0].alias_info is not None and operands else None


def _starts(results: list[Tensor], arguments: dict[str, Any]) -> list[int]:
    """Return where each of several parts begins along the axis that is split."""
    dim = arguments.get("dim")
    starts, start = [], 0
    for tensor in results:
        starts.append(start)
        if isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim():
            start += tensor.shape[dim]
    return starts
