"""Units of the models people have are found, and what is left without zero ones equals the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import proxmo
from compaction import handwritten, huggingface
from proxmo import GroupL2, ProxSGD, compact, load_compact, save_compact, unit_groups
from proxmo.compaction.example_inputs import ModelInputs

MODELS = {**handwritten.MODELS, **huggingface.MODELS}
LIKE_OTHERS = {
    "BERT, eager attention", "DistilBERT", "RoBERTa", "ELECTRA", "DeiT", "OPT", "GPT-2 without cache", "GPT-J", "Llama",
    "Llama, eager attention", "Qwen2", "Mistral", "Phi",
}  # fmt: skip
"""Models with the layers of another one in the table, which run with ``-m slow``."""
WITHOUT_RESIDUAL = ["*norm", "*layernorm"]
"""The residual width of these models has norms in float32, which a test of its own covers."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*nested tensor")


def make(name: str) -> tuple[nn.Module, Callable[[int, int], Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name][:2]
    made = model().eval().double()
    with torch.no_grad():
        for module in made.modules():  # as after training
            for p in module.parameters(recurse=False):
                if p.dim() == 1:
                    p.add_(0.3 * torch.randn_like(p))

    def inputs_of(batch: int, length: int) -> Any:
        values = inputs(batch, length)
        if isinstance(values, dict):
            return {key: _in_double(value) for key, value in values.items()}
        return tuple(map(_in_double, values))

    return made, inputs_of


def _in_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def units_of(model: nn.Module, example: Any) -> proxmo.ParamGroups:
    patterns = WITHOUT_RESIDUAL if isinstance(example, dict) else []
    names = [name for name, _ in model.named_modules()]
    present = [p for p in patterns if any(proxmo.layers.matches(name, [p]) for name in names)]
    return unit_groups(model, example, GroupL2(0.1), exclude=present)


def set_zero(groups: proxmo.ParamGroups, choose: Callable[[int], list[int]]) -> None:
    """Set chosen units of each family to zero, as a prox would."""
    with torch.no_grad():
        for group in ProxSGD(groups).param_groups:
            for family in group["units"] or ():
                matrix = proxmo.optim.units.joined(family, group["params"])
                matrix[choose(len(matrix))] = 0
                proxmo.optim.units.write_back(family, matrix, group["params"])


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    return ModelInputs.from_example(inputs).output_tensors(model)


def assert_equal(small: nn.Module, model: nn.Module, inputs: Any) -> None:
    for actual, expected in zip(outputs(small, inputs), outputs(model, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def outside_embeddings(model: nn.Module) -> list[Tensor]:
    embedded = {
        id(p)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or "embed" in name or name == "lm_head"
        for p in module.parameters()
    }
    return [p for p in model.parameters() if id(p) not in embedded]


def size_outside_embeddings(model: nn.Module) -> int:
    return sum(p.numel() for p in outside_embeddings(model))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in MODELS]
)
def test_zero_units_are_removed_exactly(name: str, tmp_path: Path) -> None:
    model, inputs = make(name)
    groups = units_of(model, inputs(2, 7))
    outside = {id(p) for p in outside_embeddings(model)}
    covered = sum(p.numel() for group in groups if group.get("units") for _, p in group["params"] if id(p) in outside)
    assert covered >= MODELS[name][2] * size_outside_embeddings(model), groups.notes

    random = torch.Generator().manual_seed(1)
    set_zero(groups, lambda size: torch.randperm(size, generator=random)[: size // 2].tolist())
    before = copy.deepcopy(model.state_dict())
    small, report = compact(model, inputs(2, 7))
    assert report.parameters[1] < report.parameters[0]
    for batch, length in ((2, 7), (5, 9), (1, 4)):
        assert_equal(small, model, inputs(batch, length))
    assert outputs(copy.deepcopy(small).train(), inputs(3, 7))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))

    save_compact(small, tmp_path / "small.safetensors")
    loaded = load_compact(make(name)[0], tmp_path / "small.safetensors")
    assert_equal(loaded, small, inputs(3, 6))

    set_zero(groups, lambda size: list(range(1, size)))
    smallest, report = compact(model, inputs(2, 7))
    assert size_outside_embeddings(smallest) <= MODELS[name][3] * size_outside_embeddings(model), report
    assert_equal(smallest, model, inputs(3, 5))
