"""Compacted models equal the original on inputs other than the example: other values, sizes, masks and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo import CompactionError, GroupL2, compact, unit_groups


def zero(layer: nn.Module, *units: int, bias: float | None = 0.0) -> None:
    """Set rows of the weight to zero, and their bias to a constant."""
    with torch.no_grad():
        layer.weight[list(units)] = 0  # type: ignore[index, operator]
        if bias is not None:
            layer.bias[list(units)] = bias  # type: ignore[index, operator]


class Net(nn.Module):
    """Two linear layers with a function in between, which also receives the other inputs."""

    def __init__(self, between: Callable[..., Tensor], inputs: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, 2)
        self.between = between

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.last(self.between(self.first(x), *others))


class ConvNet(nn.Module):
    """Two convolutions with other layers in between."""

    def __init__(self, *between: nn.Module, first: nn.Module | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first or nn.Conv2d(3, 8, 3)
        self.between = nn.Sequential(*between)
        self.last = last or nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))


Case = tuple[nn.Module, tuple[Tensor, ...], list[tuple[Tensor, ...]], int]


def added_timestep() -> Case:
    model = Net(lambda h, t: functional.silu(h + t[:, None].float() / 1000))
    zero(model.first, 6, 7)
    return model, (randn(4, 3), torch.full((4,), 7)), [(randn(4, 3), torch.arange(4) * 100)], 8


def multiplied_by_mask() -> Case:
    model = Net(lambda h, mask: functional.relu(h) * mask[..., None])
    zero(model.first, 2, 5, bias=1.0)
    zero(model.first, 1)
    masks = [(randn(4, 5, 3), (torch.rand(4, 5) > 0.5).float()), (randn(4, 5, 3), (torch.rand(4, 5) > 0.5).long())]
    return model, (randn(4, 5, 3), torch.ones(4, 5)), masks, 7  # a zero unit stays zero under any mask


def summed_over_sequence() -> Case:
    model = Net(lambda h: functional.relu(h).sum(1))
    zero(model.first, 2, 5, bias=1.0)
    zero(model.first, 1)
    return model, (randn(4, 5, 3),), [(randn(4, 9, 3),)], 7


def averaged_over_sequence() -> Case:
    model = Net(lambda h: functional.relu(h).mean(1))
    zero(model.first, 2, 5, bias=1.0)
    return model, (randn(4, 5, 3),), [(randn(4, 9, 3),)], 6  # the mean of a constant does not depend on the length


def multiplied_by_batch_size() -> Case:
    model = Net(lambda h: functional.relu(h) * h.shape[0])
    zero(model.first, 2, 5, bias=1.0)
    return model, (randn(4, 3),), [(randn(9, 3),)], 8


def added_scalar_from_input() -> Case:
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


def added_table_row() -> Case:
    class Table(Net):
        def __init__(self) -> None:
            super().__init__(lambda h: h)
            self.table = nn.Parameter(torch.randn(10, 8))

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return self.last(functional.silu(self.first(x) + self.table[others[0]]))

    model = Table()
    zero(model.first, 6, 7)
    return model, (randn(1, 3), torch.tensor([7])), [(randn(1, 3), torch.tensor([2]))], 8


def added_position_embedding() -> Case:
    class PositionEmbedding(Net):
        def __init__(self) -> None:
            super().__init__(lambda h: h)
            self.positions = nn.Parameter(torch.randn(1, 10, 8))

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return self.last(functional.silu(self.first(x) + self.positions[:, : x.shape[1]]))

    model = PositionEmbedding()
    zero(model.first, 6, 7)
    return model, (randn(2, 1, 3),), [(randn(2, 6, 3),)], 8


def zero_on_example_only() -> Case:
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


def padded_depthwise_on_single_pixel() -> Case:
    model = ConvNet(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), first=nn.Conv2d(3, 8, 4, stride=4))
    zero(model.first, 1, 2, bias=1.0)
    with torch.no_grad():
        model.between[1].weight[1:3] += 1  # type: ignore[index, operator]
    return model, (randn(2, 3, 4, 4),), [(randn(2, 3, 16, 16),)], 8


def padded_average_pooling() -> Case:
    model = ConvNet(nn.ReLU(), nn.AvgPool2d(3, 1, 1))
    zero(model.first, 1, 2, bias=1.0)
    return model, (randn(2, 3, 4, 4),), [(randn(2, 3, 12, 12),)], 8


def pooled_and_upsampled() -> Case:
    model = ConvNet(nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))
    zero(model.first, 1, 2, bias=1.0)
    return model, (randn(2, 3, 8, 8),), [(randn(2, 3, 16, 16),)], 6


def argmax_over_channels() -> Case:
    class Both(ConvNet):
        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return self.last(hidden), hidden.argmax(1)

    model = Both()
    zero(model.first, 4)
    return model, (randn(2, 3, 4, 4),), [(50 * randn(2, 3, 4, 4),)], 8


def custom_forward() -> Case:
    class Exponential(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight.exp(), self.bias)

    model = Net(functional.relu)
    model.last = Exponential(8, 2)
    with torch.no_grad():
        model.last.weight[:, 3] = 0
        model.first.bias[3] = -5
    return model, (randn(4, 3),), [(50 * randn(20, 3),)], 8


def custom_hook() -> Case:
    model = Net(functional.relu)
    zero(model.first, 3)
    model.first.register_forward_hook(lambda module, inputs, output: output + inputs[0].sum())
    return model, (torch.zeros(4, 3),), [(randn(4, 3),)], 8


def squeeze_and_excitation() -> Case:
    class SqueezeAndExcitation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = functional.relu(self.first(x))
            return self.last(hidden * torch.sigmoid(self.gate(hidden.mean((2, 3))))[..., None, None])

    model = SqueezeAndExcitation()
    zero(model.first, 1, 2)
    return model, (randn(2, 3, 6, 6),), [(50 * randn(3, 3, 9, 9),)], 6  # a zero unit stays zero under any gate


def padded_half_precision() -> Case:
    class Padded(ConvNet):
        def forward(self, x: Tensor) -> Any:
            return self.last(functional.pad(self.first(x), (1, 1, 1, 1)))

    model = Padded(first=nn.Conv2d(3, 8, 1), last=nn.Conv2d(8, 2, 3))
    zero(model.first, 1, 2, 3, bias=0.1)
    return model.bfloat16(), (randn(2, 3, 8, 8).bfloat16(),), [(randn(2, 3, 8, 8).bfloat16(),)], 8


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


CASES = [
    added_timestep,
    multiplied_by_mask,
    summed_over_sequence,
    averaged_over_sequence,
    multiplied_by_batch_size,
    added_scalar_from_input,
    softmax,
    added_table_row,
    added_position_embedding,
    zero_on_example_only,
    local_response_norm,
    channel_shuffle,
    padded_depthwise_on_single_pixel,
    padded_average_pooling,
    pooled_and_upsampled,
    argmax_over_channels,
    custom_forward,
    custom_hook,
    squeeze_and_excitation,
    padded_half_precision,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_outputs_are_equal_on_unseen_inputs(case: Callable[[], Case]) -> None:
    torch.manual_seed(1)
    model, example, others, width = case()
    small, report = compact(model.eval(), example)
    assert report.widths["first"][1] == width
    for inputs in (example, *others):
        with torch.no_grad():
            actual, expected = small(*inputs), model(*inputs)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [added_timestep, softmax, local_response_norm],
    ids=lambda case: case.__name__,
)
def test_layers_without_removable_units_are_not_penalised(case: Callable[[], Case]) -> None:
    model, example, _, _ = case()
    groups = unit_groups(model, example, GroupL2(0.1))
    assert [group["penalty"] for group in groups] == [None]
    assert [note for note in groups.notes if note.startswith("not penalised: first: ")]


def test_uncalled_layers_are_reported_and_training_still_runs() -> None:
    class WithAuxiliaryHead(nn.Module):
        """Has a second head, called in training only."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.auxiliary = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            hidden = functional.relu(self.first(x))
            return (self.last(hidden), self.auxiliary(hidden)) if self.training else self.last(hidden)

    model = WithAuxiliaryHead()
    zero(model.first, 1, 2)
    small, report = compact(model, randn(4, 3))
    assert small(randn(4, 3))[1].shape == (4, 2)
    assert report.kept == [
        "auxiliary: not called on the example inputs, left unchanged",
        "first: units 1, 2 stay: 'auxiliary', not called on the example inputs, may use its channels",
    ]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 8), nn.GRU(8, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))[0])


class SpatialGate(nn.Module):
    """All channels are gated by their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden * self.gate(hidden.amax(1, keepdim=True)))


class Branching(nn.Module):
    """The last layer depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden) if x.sum() > 0 else self.other(hidden)


@pytest.mark.parametrize(
    ("model", "shape"),
    [(SpatialGate(), (2, 3, 6, 6)), (Branching(), (2, 3))],
    ids=["SpatialGate", "Branching"],
)
def test_layers_before_operations_without_a_rule_are_unchanged(model: nn.Module, shape: tuple[int, ...]) -> None:
    first = model.get_submodule("first" if hasattr(model, "first") else "0")
    zero(first, 1, 2)
    example = torch.rand(shape)
    small, report = compact(model.eval(), example)
    assert report.parameters[0] == report.parameters[1]
    for inputs in (example, -example):
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (small(inputs), model(inputs))), strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a, b)
    assert not any("units" in group for group in unit_groups(model, example, GroupL2(0.1)))


def write_to_slice(hidden: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden[:, 2:4] = hidden[:, 4:6]
    return hidden.relu()


def write_to_view(hidden: Tensor) -> Tensor:
    hidden.view(-1).add_(1.0)
    return hidden.relu()


@pytest.mark.parametrize("between", [write_to_slice, write_to_view])
def test_in_place_writes_to_slices_are_followed(between: Callable[[Tensor], Tensor]) -> None:
    model = Net(between)
    zero(model.first, 0, 2, 4)
    small, _ = compact(model, randn(4, 3))
    x = randn(9, 3)
    torch.testing.assert_close(small(x), model(x))


def test_outputs_of_different_scale_are_compared_separately() -> None:
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


class _HalfRectified(nn.Module):
    """Slices at a position, which a smaller layer would have elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.cat([h[:, :4].relu(), h[:, 4:]], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "example", [torch.zeros(1, 3), torch.ones(2, 3), torch.arange(3.0).reshape(1, 3)], ids=["zeros", "ones", "single"]
)
def test_examples_that_say_little_do_not_make_wrong_models(example: Tensor) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = _HalfRectified()
        with torch.no_grad():
            model.first.weight[1], model.first.bias[1] = 0, 0
        small, _ = compact(model, example)
        x = torch.randn(50, 3)
        torch.testing.assert_close(small(x), model(x))


def test_output_without_tensors_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Any:
            return self.layers(x).tolist()

    with pytest.raises(CompactionError, match="the model must return tensors"):
        compact(Plain(), torch.randn(4, 3))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other, self.last, self.end = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, alpha: float = 1.0, *, steps: int = 0) -> Tensor:
        hidden = self.end(self.other(x).relu())
        for _ in range(steps):
            hidden = hidden + 1
        inner = self.first(x).relu()
        return hidden + self.last(inner * torch.full_like(inner, alpha))


@pytest.mark.parametrize("example", [{"alpha": 0.0}, {"alpha": 1.0, "steps": 0}])
def test_numbers_among_the_inputs_are_not_constants(example: dict[str, float]) -> None:
    model = _Scaled()
    zero(model.other, 1)
    small, report = compact(model, {"x": randn(4, 3), **example})
    assert report.widths["first"] == (3, 3)
    assert report.widths["other"] == (3, 2)
    x = randn(5, 3)
    for alpha, steps in ((0.0, 0), (0.7, 2), (-3.0, 5)):
        torch.testing.assert_close(small(x, alpha, steps=steps), model(x, alpha, steps=steps))


def test_objects_among_the_outputs_whose_tensors_change_are_named() -> None:
    class Holder:
        def __init__(self, hidden: Tensor) -> None:
            self.parts = [{"hidden": hidden}]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x).relu()
            return self.last(hidden), Holder(hidden)

    model = Model()
    unchanged = compact(model, randn(4, 3))[1]
    assert unchanged.kept == ["no unit is zero, so nothing was removed"]
    zero(model.first, 2)
    report = compact(model, randn(4, 3))[1]
    assert report.widths["first"] == (8, 7)
    assert [note for note in report.kept if note.startswith("the model: also returns a Holder, whose tensors differ")]
