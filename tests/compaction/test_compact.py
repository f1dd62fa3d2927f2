"""Compaction removes zero units and keeps the outputs."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import proxmo
from compaction.models import CASES, call, make
from proxmo import CompactionError, GroupL2, ProxSGD, compact, unit_groups
from proxmo.compaction.report import layer_widths


def zero_units(optimizer: ProxSGD, share: float) -> None:
    """Set a share of the units of each family to exact zeros, as a prox would."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for family in group["units"] or ():
                matrix = proxmo.optim.units.joined(family, group["params"])
                matrix[: int(len(matrix) * share)] = 0
                proxmo.optim.units.write_back(family, matrix, group["params"])


def fresh_inputs(example: Any) -> Any:
    """Return different inputs of the same kind."""
    if isinstance(example, dict):
        return {name: fresh_inputs(value) for name, value in example.items()}
    if not example.is_floating_point():
        return example.flip(1)
    return 3 * torch.randn(example.shape, generator=torch.Generator().manual_seed(7)) + 1


def assert_same_outputs(model: nn.Module, small: nn.Module, example: Any) -> None:
    for inputs in (example, fresh_inputs(example)):
        for a, b in zip(call(model, inputs), call(small, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_removing_zero_units_keeps_the_outputs(name: str, share: float) -> None:
    model, example = make(name)
    groups = unit_groups(model, example, GroupL2(0.1))
    assert sum(len(group.get("units", ())) for group in groups) == CASES[name][2]
    optimizer = ProxSGD(groups)
    zero_units(optimizer, share)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    small, report = compact(model, example)
    assert_same_outputs(model, small, example)
    assert report.difference <= 1e-5
    assert report.parameters == tuple(sum(p.numel() for p in m.parameters()) for m in (model, small))
    assert report.parameters[1] < report.parameters[0]
    assert report.multiply_adds[1] < report.multiply_adds[0]
    assert report.kept == []
    # no zero units are left
    left = unit_groups(small, example, GroupL2(0.1))
    assert not left or all(s.groups in (None, 0.0) for s in ProxSGD(left).sparsity())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", list(CASES))
def test_model_without_zeros_is_unchanged(name: str) -> None:
    model, example = make(name)
    small, report = compact(model.eval(), example)
    assert report.parameters[0] == report.parameters[1]
    assert all(before == after for before, after in report.widths.values())
    assert small is not model
    for a, b in zip(call(model, example), call(small, example), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", list(CASES))
def test_all_zero_model_keeps_one_unit_per_layer(name: str) -> None:
    model, example = make(name)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    small, _ = compact(model.eval(), example)
    assert_same_outputs(model, small, example)
    assert all(size > 0 for p in small.parameters() for size in p.shape)


def trained_network() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(100, 2, 6, 6)
    model = nn.Sequential(
        nn.Conv2d(2, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 1),
    )
    optimizer = ProxSGD(unit_groups(model, inputs[:2], GroupL2(0.05)), lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        (model(inputs).squeeze(1) - inputs[:, 0, 2, 2]).square().mean().backward()
        optimizer.step()
    return model, inputs


def test_units_zeroed_by_training_are_removed() -> None:
    model, inputs = trained_network()
    zero = (model[0].weight == 0).flatten(1).all(1)
    assert 0 < zero.sum() < 12
    assert not model[0].bias[zero].any()
    assert not model[1].weight[zero].any()
    assert not model[1].bias[zero].any()
    small, report = compact(model, inputs[:3])
    assert small.training
    assert report.widths["0"] == (12, 12 - int(zero.sum()))
    assert_same_outputs(model.eval(), small.eval(), inputs)
    small.train()
    loss = small(inputs).square().mean()  # training can continue
    loss.backward()
    assert all(p.grad is not None for p in small.parameters())


def test_constant_units_are_folded_into_the_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6),
        nn.Sigmoid(),
        nn.Conv2d(6, 4, 3, bias=False),
        nn.Flatten(),
        nn.Linear(16, 2),
    ).eval()
    with torch.no_grad():
        model[0].weight[:2] = 0  # outputs σ of a constant
        model[1].weight[2] = 0  # outputs σ(bias) for any input
        nn.init.normal_(model[1].bias)
        nn.init.normal_(model[1].running_mean)
    inputs = torch.randn(3, 2, 6, 6)
    small, report = compact(model, inputs)
    assert report.widths["0"] == (6, 3)
    assert isinstance(small[3], nn.Conv2d)
    assert small[3].bias is not None
    assert_same_outputs(model, small, inputs)


def test_constant_unit_before_zero_padding_stays_and_is_reported() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        model[0].weight[[1, 4]] = 0
        model[0].bias[1], model[0].bias[4] = 0.5, 0.0
    inputs = torch.randn(3, 2, 6, 6)
    small, report = compact(model, inputs)
    assert report.widths["0"] == (6, 5)  # only the unit without a bias is removed
    assert report.kept == ["0: unit 1 stays: '2' pads the constant with zeros"]
    assert_same_outputs(model, small, inputs)
    model[2].padding_mode = "replicate"
    assert compact(model, inputs)[1].widths["0"] == (6, 4)


def test_unread_units_are_removed_then_those_only_they_read() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[4].weight[:, 1:] = 0  # only unit 0 of the second layer is read
        model[2].weight[0, 2:] = 0  # unit 0 reads two units of the first layer
    small, report = compact(model, torch.randn(6, 3))
    assert [after for _, after in report.widths.values()] == [2, 1, 2]
    assert_same_outputs(model, small, torch.randn(6, 3))


def test_unit_that_is_zero_only_on_the_example_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].bias[0] = -100.0  # the ReLU is inactive on the example, not on larger inputs
    _, report = compact(model, torch.randn(6, 3))
    assert report.widths["0"] == (5, 5)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("called twice", "layer", "addmm joins its channels with values of a fixed size"),
        ("added to input", "conv", "add joins its channels with values of a fixed size"),
        ("centred", "layer", "mean mixes its channels"),
        ("two layers", "2", "it is an output of the model"),
    ],
)
def test_zero_units_that_stay_are_reported_with_the_reason(name: str, layer: str, reason: str) -> None:
    model, example = make(name)
    with torch.no_grad():
        for p in model.get_submodule(layer).parameters():
            p[1] = 0
    small, report = compact(model.eval(), example)
    assert any(re.search(f"^{re.escape(layer)}: unit 1 stays: {reason}", line) for line in report.kept), report.kept
    assert_same_outputs(model, small, example)


class HardcodedChannels(nn.Module):
    """Reshapes with a hard-coded number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(torch.relu(self.embed(x)))
        return self.head(hidden.reshape(-1, 6).relu())


def test_removal_that_breaks_the_model_is_undone_and_others_are_kept() -> None:
    torch.manual_seed(0)
    model = HardcodedChannels()
    with torch.no_grad():
        model.embed.weight[3] = 0
        model.hidden.weight[2] = 0
    example = torch.randn(3, 4)
    small, report = compact(model, example)
    assert report.widths == {"embed": (8, 7), "hidden": (6, 6), "head": (2, 2)}
    assert report.kept[0].startswith(
        "hidden: unit 2 stays: the pruned model does not run: RuntimeError: shape '[-1, 6]'"
    )
    assert_same_outputs(model, small, example)


@pytest.mark.parametrize("second", [nn.Conv2d(4, 4, 1, groups=2), weight_norm(nn.Conv2d(4, 4, 1))])
def test_grouped_and_parametrized_layers_are_unchanged(second: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), second, nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0, 0
    small, report = compact(model, torch.randn(2, 2, 2, 2))
    assert report.widths["0"] == (4, 4)
    assert_same_outputs(model.eval(), small.eval(), torch.randn(2, 2, 2, 2))


def test_requires_grad_training_mode_and_dtype_are_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(), nn.ReLU(), nn.Linear(6, 2)).double()
    model[3].requires_grad_(False)
    model[1].eval()
    with torch.no_grad():
        model[0].weight[:3] = 0
    small, report = compact(model, torch.randn(4, 3, dtype=torch.float64))
    assert report.difference <= 1e-12
    assert [p.requires_grad for p in small.parameters()] == [True, True, False, False]
    assert [module.training for module in small.modules()] == [True, True, False, True, True]
    assert {p.dtype for p in small.parameters()} == {torch.float64}


def test_widths_are_those_of_layers_of_all_kinds() -> None:
    class Conv1D(nn.Module):  # as that of transformers: the weight is (inputs, outputs)
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(3, 7)), nn.Parameter(torch.zeros(7))

    layers = {"lstm": nn.LSTM(3, 5), "cell": nn.GRUCell(3, 4), "conv": nn.Conv2d(1, 2, 3), "other": Conv1D()}
    assert layer_widths(nn.ModuleDict({**layers, "norm": nn.LayerNorm(3)})) == {
        "lstm": 5, "cell": 4, "conv": 2, "other": 7,
    }  # fmt: skip


def with_nan() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].running_mean[0] = math.nan  # type: ignore[index]
    return model


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            torch.compile(nn.Linear(2, 2), backend="eager"),
            TypeError,
            "neither scripted nor compiled, got OptimizedModule",
        ),
        (nn.Identity(), CompactionError, "no output depends on its parameters"),
        (nn.Linear(5, 2), CompactionError, "the model does not run on example_inputs: RuntimeError: .*mat1 and mat2"),
        (nn.LazyLinear(2), ValueError, "model must have no uninitialized parameters"),
        (nn.Sequential(nn.Linear(2, 2), Noise()), CompactionError, "the model is not deterministic"),
        ("model", TypeError, "model must be an nn.Module"),
        (with_nan(), CompactionError, "the outputs on example_inputs have NaN, .*; '1.running_mean' has NaN, too"),
    ],
)
def test_models_that_cannot_be_compacted_are_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compact(model, torch.randn(2, 2))


@pytest.mark.parametrize("example", [None, 5, "abc"])
def test_example_inputs_of_other_types_are_refused(example: Any) -> None:
    with pytest.raises(TypeError, match="example_inputs must be a tensor, a tuple of arguments or a dictionary"):
        compact(nn.Linear(2, 2), example)
    with pytest.raises(TypeError, match="example_inputs must be a tensor, a tuple of arguments or a dictionary"):
        unit_groups(nn.Linear(2, 2), example, GroupL2(0.1))


def test_rng_state_is_unchanged() -> None:
    model, example = make("ResNet")
    state = torch.get_rng_state()
    unit_groups(model, example, GroupL2(0.1))
    compact(model, example)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
