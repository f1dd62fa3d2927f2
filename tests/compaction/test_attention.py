"""Pruned attention equals `nn.MultiheadAttention` whose removed heads are zero."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo import GroupL2, compact, unit_groups
from proxmo.compaction.attention import PrunedMultiheadAttention, remove_heads
from proxmo.compaction.attributes import _RefuseAttentionWithoutHeads


def make(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, **options)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer.eval()


def zero_head(layer: nn.MultiheadAttention, head: int) -> None:
    """Set the value projection of a head to zero, bias included."""
    with torch.no_grad():
        if layer.in_proj_bias is not None:
            layer.in_proj_bias[24 + 4 * head : 28 + 4 * head] = 0
        if layer.in_proj_weight is not None:
            layer.in_proj_weight[24 + 4 * head : 28 + 4 * head] = 0
        else:
            layer.v_proj_weight[4 * head : 4 * head + 4] = 0


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False, False, False, True, True], [False, False, False, False, True]])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"attn_mask": CAUSAL},
        {"attn_mask": torch.randn(5, 5, generator=torch.Generator().manual_seed(1))},
        {"key_padding_mask": PADDING},
        {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
        {"attn_mask": CAUSAL, "is_causal": True},
    ],
    ids=["none", "causal", "float", "padding", "both", "is_causal"],
)
def test_outputs_equal_torch(batch_first: bool, bias: bool, need_weights: bool, masks: dict[str, Any]) -> None:
    layer = make(batch_first=batch_first, bias=bias)
    zero_head(layer, 1)
    small = remove_heads(layer, [1])
    x = torch.randn(2, 5, 12) if batch_first else torch.randn(5, 2, 12)
    expected, _ = layer(x, x, x, need_weights=need_weights, **masks)
    actual, weights = small(x, x, x, need_weights=need_weights, **masks)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    if need_weights:
        _, weights_per_head = layer(x, x, x, average_attn_weights=False, **masks)
        torch.testing.assert_close(weights, weights_per_head[:, [0, 2]].mean(1))
    else:
        assert weights is None


def test_attention_with_all_heads_equals_torch() -> None:
    layer = make(batch_first=True)
    x = torch.randn(2, 5, 12)
    actual, weights = remove_heads(layer, [])(x, x, x)
    expected, expected_weights = layer(x, x, x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("need_weights", [True, False])
def test_unbatched_inputs_with_kdim_and_vdim_equal_torch(need_weights: bool) -> None:
    layer = make(kdim=7, vdim=9)
    zero_head(layer, 0)
    small = remove_heads(layer, [0])
    inputs = torch.randn(4, 12), torch.randn(6, 7), torch.randn(6, 9)
    expected, weights = layer(*inputs, need_weights=need_weights)
    actual, actual_weights = small(*inputs, need_weights=need_weights)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert (actual_weights is None) == (weights is None)
    if actual_weights is not None and weights is not None:
        assert actual_weights.shape == weights.shape


def test_head_with_zero_output_projection_is_removed() -> None:
    model = Wrapped()
    with torch.no_grad():
        model.attention.out_proj.weight[:, 8:] = 0
    x = torch.randn(5, 2, 12)
    small, report = compact(model, x)
    assert report.widths["attention"] == (3, 2)
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-6)


def test_dropout_applies_in_training_only() -> None:
    layer = make(dropout=0.5, batch_first=True)
    small = remove_heads(layer, [])
    x = torch.randn(2, 5, 12)
    assert torch.equal(small(x, x, x)[0], small(x, x, x)[0])
    small.train()
    assert not torch.equal(small(x, x, x, need_weights=False)[0], small(x, x, x, need_weights=False)[0])


def test_mask_per_head_is_refused() -> None:
    small = remove_heads(make(), [1])
    x = torch.randn(5, 2, 12)
    with pytest.raises(ValueError, match=r"attn_mask must be 2-D since heads were removed, got shape \(6, 5, 5\)"):
        small(x, x, x, attn_mask=torch.zeros(6, 5, 5))


class Wrapped(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = make(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


def test_compaction_removes_heads_or_reports_why_not() -> None:
    x = torch.randn(5, 2, 12)
    model = Wrapped()
    zero_head(model.attention, 1)
    small, report = compact(model, x)
    assert isinstance(small.attention, PrunedMultiheadAttention)
    assert report.widths["attention"] == (3, 2)
    assert report.difference <= 1e-5
    for head in range(3):
        zero_head(model.attention, head)
    _, report = compact(model, x)
    assert report.widths["attention"] == (3, 1)
    assert report.kept == ["attention: head 0 stays: one must remain"]
    special = Wrapped(add_bias_kv=True)
    with torch.no_grad():
        special.attention.in_proj_weight.view(3, 3, 4, 12)[:, 1] = 0
        special.attention.bias_k[..., 4:8], special.attention.bias_v[..., 4:8] = 0, 0
    _, report = compact(special, x)
    assert report.kept == ["attention: head 1 stays: the layer uses add_bias_kv or add_zero_attn"]


def test_heads_stay_if_attention_weights_are_an_output() -> None:
    class Both(Wrapped):
        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x)

    model = Both()
    zero_head(model.attention, 1)
    _, report = compact(model, torch.randn(5, 2, 12))
    assert report.widths["attention"] == (3, 3)
    groups = unit_groups(model, torch.randn(5, 2, 12), GroupL2(0.1))
    assert "not penalised: attention: view splits its channels" in groups.notes


@pytest.mark.parametrize("need_weights", [True, False])
def test_compaction_is_exact_for_fully_masked_queries(need_weights: bool) -> None:
    """The attention weights of a fully masked query are zero or NaN and do not sum to one."""

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
    mask = torch.zeros(3, 3, dtype=torch.bool)
    _, report = compact(model, (torch.randn(2, 3, 8), mask))
    assert report.kept == ["layer: head 1 stays: 'layer' reads a varying value"]
    with torch.no_grad():
        model.layer.in_proj_bias.view(3, 2, 4)[:, 1] = 0
    small, report = compact(model, (torch.randn(2, 3, 8), mask))
    assert report.widths["layer"] == (2, 1)
    mask[0] = True
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(small(x, mask), model(x, mask), equal_nan=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_compacted_transformer_equals_original_with_padding_mask(nested: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    for block in model.layers:
        with torch.no_grad():
            block.self_attn.in_proj_weight.view(3, 4, 4, 16)[:, 1] = 0
            block.self_attn.in_proj_bias.view(3, 4, 4)[:, 1] = 0
            block.linear1.weight[:5] = 0
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    for example in (x, {"src": x, "src_key_padding_mask": padding}):
        small, report = compact(model, example)
        assert report.widths["layers.0.self_attn"] == (4, 3)
        assert report.widths["layers.1.linear1"] == (32, 27)
        with torch.set_grad_enabled(gradients):
            actual, expected = small(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding)
        seen = ~padding[:, : actual.shape[1]]
        torch.testing.assert_close(actual[seen], expected[:, : actual.shape[1]][seen], rtol=1e-4, atol=1e-5)


def test_heads_stay_in_custom_or_hooked_attention() -> None:
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
    hooked = nn.MultiheadAttention(8, 2, batch_first=True)
    hooked.register_forward_hook(lambda module, inputs, output: (output[0].clamp(-3, 3), output[1]))
    for model, reason in (
        (Model(Clipped(8, 2, batch_first=True)), "the Clipped has its own forward or hooks"),
        (Model(hooked), "the MultiheadAttention has its own forward or hooks"),
    ):
        _, report = compact(model.eval(), torch.randn(2, 3, 8))
        assert report.kept == [f"layer: head 1 stays: {reason}"]
        assert report.parameters[0] == report.parameters[1]
    reused = Model(nn.MultiheadAttention(8, 2, batch_first=True), twice=True).eval()
    small, report = compact(reused, torch.randn(2, 3, 8))
    assert report.widths["layer"] == (2, 1)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(small(x), reused(x))
    assert small.again is small.layer


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
    small, _ = compact(model, torch.randn(2, 3, 8))
    assert [p.requires_grad for p in small.layer.parameters()] == [False] * 8
    assert not any(module.training for module in small.layer.modules())
    assert small.training


def test_trial_without_heads_raises_where_old_versions_of_torch_end_the_process() -> None:
    query, nothing = torch.zeros(1, 4, 3, 8), torch.zeros(1, 0, 3, 8)
    with _RefuseAttentionWithoutHeads(), pytest.raises(RuntimeError, match="attention has no heads"):
        functional.scaled_dot_product_attention(query, query, value=nothing, enable_gqa=True)
