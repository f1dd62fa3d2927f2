"""Compaction holds for inputs that it has not seen: other numbers, sizes, masks and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo import CompactionError, GroupL2, compact, unit_groups


def zero(layer: nn.Module, *units: int, bias: float | None = 0.0) -> None:
    """Set rows of a layer to zero, and their bias to a number."""
    with torch.no_grad():
        layer.weight[list(units)] = 0  # type: ignore[index, operator]
        if bias is not None:
            layer.bias[list(units)] = bias  # type: ignore[index, operator]


class Net(nn.Module):
    """Two linear layers, and a function in between that may look at other inputs."""

    def __init__(self, between: Callable[..., Tensor], inputs: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, 2)
        self.between = between

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.last(self.between(self.first(x), *others))


class ConvNet(nn.Module):
    """Two convolutions around other layers."""

    def __init__(self, *between: nn.Module, first: nn.Module | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first or nn.Conv2d(3, 8, 3)
        self.between = nn.Sequential(*between)
        self.last = last or nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))


Case = tuple[nn.Module, tuple[Tensor, ...], list[tuple[Tensor, ...]], int]


def with_timestep() -> Case:
    model = Net(lambda h, t: functional.silu(h + t[:, None].float() / 1000))
    zero(model.first, 6, 7)
    return model, (randn(4, 3), torch.full((4,), 7)), [(randn(4, 3), torch.arange(4) * 100)], 8


def with_mask() -> Case:
    model = Net(lambda h, mask: functional.relu(h) * mask[..., None])
    zero(model.first, 2, 5, bias=1.0)
    zero(model.first, 1)
    masks = [(randn(4, 5, 3), (torch.rand(4, 5) > 0.5).float()), (randn(4, 5, 3), (torch.rand(4, 5) > 0.5).long())]
    return model, (randn(4, 5, 3), torch.ones(4, 5)), masks, 7  # zero times anything is zero


def summed_over_a_set() -> Case:
    model = Net(lambda h: functional.relu(h).sum(1))
    zero(model.first, 2, 5, bias=1.0)
    zero(model.first, 1)
    return model, (randn(4, 5, 3),), [(randn(4, 9, 3),)], 7


def averaged_over_a_set() -> Case:
    model = Net(lambda h: functional.relu(h).mean(1))
    zero(model.first, 2, 5, bias=1.0)
    return model, (randn(4, 5, 3),), [(randn(4, 9, 3),)], 6  # a mean of constants is one, of any number of them


def multiplied_by_the_size() -> Case:
    model = Net(lambda h: functional.relu(h) * h.shape[0])
    zero(model.first, 2, 5, bias=1.0)
    return model, (randn(4, 3),), [(randn(9, 3),)], 8


def with_a_number_of_the_input() -> Case:
    model = Net(lambda h, x: functional.relu(h) + x.max().item())
    zero(model.first, 2)
    return model, (randn(4, 3), torch.ones(3)), [(randn(4, 3), torch.full((3,), 5.0))], 8


def softmax() -> Case:
    model = Net(lambda h: h.softmax(-1))
    with torch.no_grad():
        model.last.weight[:, 3] = 0
        model.first.bias[3] = -20
        model.first.weight[3] *= 10
    return model, (randn(4, 3),), [(10 * randn(64, 3),)], 8


def of_a_row_of_a_table() -> Case:
    class Table(Net):
        def __init__(self) -> None:
            super().__init__(lambda h: h)
            self.table = nn.Parameter(torch.randn(10, 8))

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return self.last(functional.silu(self.first(x) + self.table[others[0]]))

    model = Table()
    zero(model.first, 6, 7)
    return model, (randn(1, 3), torch.tensor([7])), [(randn(1, 3), torch.tensor([2]))], 8


def with_positions() -> Case:
    class Positions(Net):
        def __init__(self) -> None:
            super().__init__(lambda h: h)
            self.places = nn.Parameter(torch.randn(1, 10, 8))

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return self.last(functional.silu(self.first(x) + self.places[:, : x.shape[1]]))

    model = Positions()
    zero(model.first, 6, 7)
    return model, (randn(2, 1, 3),), [(randn(2, 6, 3),)], 8


def zero_on_the_example_only() -> Case:
    model = Net(functional.relu)
    with torch.no_grad():
        model.first.bias[3] = -100.0
    return model, (randn(4, 3),), [(1000 * randn(64, 3),)], 8


def local_response_norm() -> Case:
    model = ConvNet(nn.ReLU(), nn.LocalResponseNorm(5))
    zero(model.first, 3)
    return model, (0.3 * randn(2, 3, 8, 8),), [(50 * randn(2, 3, 8, 8),)], 8


def channel_shuffle() -> Case:
    model = ConvNet(nn.ReLU(), nn.ChannelShuffle(2), first=nn.Conv2d(3, 8, 1))
    zero(model.first, 2, 5)
    with torch.no_grad():
        model.first.bias[[1, 6]] = -5  # type: ignore[index, operator]
    return model, (randn(2, 3, 4, 4),), [(50 * randn(2, 3, 4, 4),)], 8


def padded_depthwise_on_one_pixel() -> Case:
    model = ConvNet(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), first=nn.Conv2d(3, 8, 4, stride=4))
    zero(model.first, 1, 2, bias=1.0)
    with torch.no_grad():
        model.between[1].weight[1:3] += 1  # type: ignore[index, operator]
    return model, (randn(2, 3, 4, 4),), [(randn(2, 3, 16, 16),)], 8


def padded_average() -> Case:
    model = ConvNet(nn.ReLU(), nn.AvgPool2d(3, 1, 1))
    zero(model.first, 1, 2, bias=1.0)
    return model, (randn(2, 3, 4, 4),), [(randn(2, 3, 12, 12),)], 8


def pooled_and_scaled_up() -> Case:
    model = ConvNet(nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))
    zero(model.first, 1, 2, bias=1.0)
    return model, (randn(2, 3, 8, 8),), [(randn(2, 3, 16, 16),)], 6


def index_of_the_largest() -> Case:
    class Both(ConvNet):
        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return self.last(hidden), hidden.argmax(1)

    model = Both()
    zero(model.first, 4)
    return model, (randn(2, 3, 4, 4),), [(50 * randn(2, 3, 4, 4),)], 8


def own_forward() -> Case:
    class Exponential(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight.exp(), self.bias)

    model = Net(functional.relu)
    model.last = Exponential(8, 2)
    with torch.no_grad():
        model.last.weight[:, 3] = 0
        model.first.bias[3] = -5
    return model, (randn(4, 3),), [(50 * randn(20, 3),)], 8


def own_hook() -> Case:
    model = Net(functional.relu)
    zero(model.first, 3)
    model.first.register_forward_hook(lambda module, inputs, output: output + inputs[0].sum())
    return model, (torch.zeros(4, 3),), [(randn(4, 3),)], 8


def gated_by_attention_to_channels() -> Case:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = functional.relu(self.first(x))
            return self.last(hidden * torch.sigmoid(self.gate(hidden.mean((2, 3))))[..., None, None])

    model = Gated()
    zero(model.first, 1, 2)
    return model, (randn(2, 3, 6, 6),), [(50 * randn(3, 3, 9, 9),)], 6  # zero times the gate


def half_precision_on_a_border() -> Case:
    class Padded(ConvNet):
        def forward(self, x: Tensor) -> Any:
            return self.last(functional.pad(self.first(x), (1, 1, 1, 1)))

    model = Padded(first=nn.Conv2d(3, 8, 1), last=nn.Conv2d(8, 2, 3))
    zero(model.first, 1, 2, 3, bias=0.1)
    return model.bfloat16(), (randn(2, 3, 8, 8).bfloat16(),), [(randn(2, 3, 8, 8).bfloat16(),)], 8


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


CASES = [
    with_timestep,
    with_mask,
    summed_over_a_set,
    averaged_over_a_set,
    multiplied_by_the_size,
    with_a_number_of_the_input,
    softmax,
    of_a_row_of_a_table,
    with_positions,
    zero_on_the_example_only,
    local_response_norm,
    channel_shuffle,
    padded_depthwise_on_one_pixel,
    padded_average,
    pooled_and_scaled_up,
    index_of_the_largest,
    own_forward,
    own_hook,
    gated_by_attention_to_channels,
    half_precision_on_a_border,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_function_is_the_same_elsewhere(case: Callable[[], Case]) -> None:
    torch.manual_seed(1)
    model, example, others, width = case()
    small, report = compact(model.eval(), example)
    assert report.widths["first"][1] == width
    for inputs in (example, *others):
        with torch.no_grad():
            found, expected = small(*inputs), model(*inputs)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [with_timestep, softmax, of_a_row_of_a_table, with_positions, local_response_norm, channel_shuffle, own_forward],
    ids=lambda case: case.__name__,
)
def test_no_penalty_on_what_cannot_be_removed(case: Callable[[], Case]) -> None:
    model, example, _, _ = case()
    groups = unit_groups(model, example, GroupL2(0.1))
    assert [group["penalty"] for group in groups] == [None]
    assert [note for note in groups.notes if note.startswith("not penalised: first: ")]


def test_layers_that_the_example_does_not_call_are_named_and_training_still_runs() -> None:
    class WithHelper(nn.Module):
        """A second head for training only, which reads what others read."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.helper = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            hidden = functional.relu(self.first(x))
            return (self.last(hidden), self.helper(hidden)) if self.training else self.last(hidden)

    model = WithHelper()
    zero(model.first, 1, 2)
    small, report = compact(model, randn(4, 3))
    assert small(randn(4, 3))[1].shape == (4, 2)
    assert report.kept == [
        "helper: was not called on the example, and is left as it is",
        "first: units 1, 2 stay: 'helper', which was not called on the example, may take part",
    ]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 8), nn.GRU(8, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))[0])


class ByTheLargest(nn.Module):
    """One channel, made from all, decides about all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden * self.gate(hidden.amax(1, keepdim=True)))


class Forked(nn.Module):
    """Which layer comes next depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden) if x.sum() > 0 else self.other(hidden)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Recurrent(), (2, 4, 3)),
        (ByTheLargest(), (2, 3, 6, 6)),
        (Forked(), (2, 3)),
        (nn.Sequential(nn.Linear(3, 8), nn.GLU(), nn.Linear(4, 2)), (2, 3)),
        (nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 2, 1)), (2, 3, 4, 4)),
        (nn.Sequential(nn.Linear(3, 8), nn.LSTM(8, 4)), (2, 3)),
        (nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2)), (2, 3)),
    ],
    ids=["GRU", "gate", "fork", "GLU", "pixels", "LSTM", "GroupNorm"],
)
def test_layers_without_a_rule_stay_whole(model: nn.Module, shape: tuple[int, ...]) -> None:
    first = model.get_submodule("first" if hasattr(model, "first") else "0")
    zero(first, 1, 2)
    example = torch.rand(shape)
    small, report = compact(model.eval(), example)
    assert report.parameters[0] == report.parameters[1]
    for inputs in (example, -example):
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (small(inputs), model(inputs))), strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a, b)
    assert not any("units" in group for group in unit_groups(model, example, GroupL2(0.1)))


def write_to_channels(hidden: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden[:, 2:4] = hidden[:, 4:6]
    return hidden.relu()


def write_to_a_view(hidden: Tensor) -> Tensor:
    hidden.view(-1).add_(1.0)
    return hidden.relu()


@pytest.mark.parametrize("between", [write_to_channels, write_to_a_view])
def test_writing_to_a_part_of_a_tensor_is_not_followed(between: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CompactionError, match="it writes to a part of a tensor"):
        compact(Net(between), randn(4, 3))


def test_outputs_of_different_size_are_compared_each_on_its_own() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.large = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Any:
            hidden = functional.layer_norm(self.first(x), (self.first.out_features,))
            return functional.softmax(self.last(hidden), -1), self.large(x) * 1e5

    model = TwoOutputs()
    zero(model.first, 3)
    with torch.no_grad():
        model.last.weight[:, 3] = 0
    _, report = compact(model, randn(4, 3))
    assert report.widths["first"] == (8, 8)
