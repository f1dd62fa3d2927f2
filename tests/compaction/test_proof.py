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


@pytest.mark.parametrize("need_weights", [True, False])
def test_places_that_attend_to_nothing(need_weights: bool) -> None:
    """Their weights of attention are zero, or NaN, and do not add up to one."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.MultiheadAttention(8, 2, batch_first=True)
            nn.init.normal_(self.layer.in_proj_bias)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x, x, x, attn_mask=mask, need_weights=need_weights)[0]  # type: ignore[no-any-return]

    model = Attention().eval()
    with torch.no_grad():
        model.layer.in_proj_weight.view(3, 2, 4, 8)[:, 1] = 0
    nobody = torch.zeros(3, 3, dtype=torch.bool)
    _, report = compact(model, (randn(2, 3, 8), nobody))
    assert report.kept == ["layer: head 1 stays: its values have a bias"]
    with torch.no_grad():
        model.layer.in_proj_bias.view(3, 2, 4)[:, 1] = 0
    small, report = compact(model, (randn(2, 3, 8), nobody))
    assert report.widths["layer"] == (2, 1)
    nobody[0] = True
    x = randn(2, 3, 8)
    torch.testing.assert_close(small(x, nobody), model(x, nobody), equal_nan=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_transformers_with_padding_masks(nested: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    for block in model.layers:
        with torch.no_grad():
            block.self_attn.in_proj_weight.view(3, 4, 4, 16)[:, 1] = 0
            block.self_attn.in_proj_bias.view(3, 4, 4)[:, 1] = 0
            block.linear1.weight[:5] = 0
    x, padding = randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    for example in (x, {"src": x, "src_key_padding_mask": padding}):
        small, report = compact(model, example)
        assert report.widths["layers.0.self_attn"] == (4, 3)
        assert report.widths["layers.1.linear1"] == (32, 27)
        with torch.set_grad_enabled(gradients):
            found, expected = small(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding)
        seen = ~padding[:, : found.shape[1]]
        torch.testing.assert_close(found[seen], expected[:, : found.shape[1]][seen], rtol=1e-4, atol=1e-5)


def test_attention_that_is_not_torchs_own_or_is_shared_keeps_its_heads() -> None:
    class Clipped(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output, weights = super().forward(*args, **kwargs)
            return output.clamp(-3, 3), weights

    class Model(nn.Module):
        def __init__(self, layer: nn.MultiheadAttention, *, twice: bool = False) -> None:
            super().__init__()
            self.layer, self.last = layer, nn.Linear(8, 2)
            self.again = layer if twice else None
            with torch.no_grad():
                layer.in_proj_weight.view(3, 2, 4, 8)[:, 1] = 0
                layer.in_proj_bias.view(3, 2, 4)[:, 1] = 0

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x, x, x, need_weights=False)[0]
            if self.again is not None:
                hidden = self.again(hidden, hidden, hidden, need_weights=False)[0]
            return self.last(hidden)

    torch.manual_seed(0)
    plain = nn.MultiheadAttention
    hooked = plain(8, 2, batch_first=True)
    hooked.register_forward_hook(lambda module, inputs, output: (output[0].clamp(-3, 3), output[1]))
    for model, reason in (
        (Model(Clipped(8, 2, batch_first=True)), "a Clipped with a forward or hooks of its own is not known"),
        (Model(hooked), "a MultiheadAttention with a forward or hooks of its own is not known"),
        (Model(plain(8, 2, batch_first=True), twice=True), "the layer is used 2 times"),
    ):
        _, report = compact(model.eval(), randn(2, 3, 8))
        assert report.kept == [f"layer: head 1 stays: {reason}"]
        assert report.parameters[0] == report.parameters[1]


def test_frozen_attention_stays_frozen() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(x, x, x, need_weights=False)[0])

    model = Model()
    with torch.no_grad():
        model.layer.in_proj_weight.view(3, 2, 4, 8)[:, 1] = 0
    model.layer.requires_grad_(False).eval()
    small, _ = compact(model, randn(2, 3, 8))
    assert [p.requires_grad for p in small.layer.parameters()] == [False] * 8
    assert not any(module.training for module in small.layer.modules())
    assert small.training


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
