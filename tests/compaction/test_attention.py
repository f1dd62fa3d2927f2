"""Attention with fewer heads computes what torch's does with the others at zero."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proxmo import compact
from proxmo.compaction.attention import FewerHeads, without_heads, zero_heads


def make(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, **options)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer.eval()


def silence(layer: nn.MultiheadAttention, head: int) -> None:
    """Set the rows of the values of a head to zero, and their bias."""
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
def test_outputs_are_those_of_torch(batch_first: bool, bias: bool, need_weights: bool, masks: dict[str, Any]) -> None:
    layer = make(batch_first=batch_first, bias=bias)
    silence(layer, 1)
    assert zero_heads(layer) == ([1], [])
    small = without_heads(layer, [1])
    x = torch.randn(2, 5, 12) if batch_first else torch.randn(5, 2, 12)
    expected, _ = layer(x, x, x, need_weights=need_weights, **masks)
    found, weights = small(x, x, x, need_weights=need_weights, **masks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if need_weights:
        _, each = layer(x, x, x, average_attn_weights=False, **masks)
        torch.testing.assert_close(weights, each[:, [0, 2]].mean(1))
    else:
        assert weights is None


def test_all_heads_together_are_torch_itself() -> None:
    layer = make(batch_first=True)
    x = torch.randn(2, 5, 12)
    found, weights = without_heads(layer, [])(x, x, x)
    expected, expected_weights = layer(x, x, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("need_weights", [True, False])
def test_other_widths_of_keys_and_values_and_no_batch(need_weights: bool) -> None:
    layer = make(kdim=7, vdim=9)
    silence(layer, 0)
    small = without_heads(layer, zero_heads(layer)[0])
    inputs = torch.randn(4, 12), torch.randn(6, 7), torch.randn(6, 9)
    expected, weights = layer(*inputs, need_weights=need_weights)
    found, own = small(*inputs, need_weights=need_weights)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (own is None) == (weights is None)
    if own is not None and weights is not None:
        assert own.shape == weights.shape


def test_a_head_that_nobody_reads_is_silent() -> None:
    layer = make()
    with torch.no_grad():
        layer.out_proj.weight[:, 8:] = 0
    assert zero_heads(layer) == ([2], [])
    x = torch.randn(5, 2, 12)
    torch.testing.assert_close(without_heads(layer, [2])(x, x, x)[0], layer(x, x, x)[0], rtol=1e-5, atol=1e-6)


def test_dropout_is_for_training_alone() -> None:
    layer = make(dropout=0.5, batch_first=True)
    small = without_heads(layer, [])
    x = torch.randn(2, 5, 12)
    assert torch.equal(small(x, x, x)[0], small(x, x, x)[0])
    small.train()
    assert not torch.equal(small(x, x, x, need_weights=False)[0], small(x, x, x, need_weights=False)[0])


def test_a_mask_for_each_head_is_refused() -> None:
    small = without_heads(make(), [1])
    x = torch.randn(5, 2, 12)
    with pytest.raises(ValueError, match=r"attn_mask must have 2 axes where heads are missing, got shape \(6, 5, 5\)"):
        small(x, x, x, attn_mask=torch.zeros(6, 5, 5))


class Wrapped(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = make(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


def test_compaction_removes_heads_or_says_why_not() -> None:
    x = torch.randn(5, 2, 12)
    model = Wrapped()
    silence(model.attention, 1)
    small, report = compact(model, x)
    assert isinstance(small.attention, FewerHeads)
    assert report.widths["attention"] == (3, 2)
    assert report.difference <= 1e-5
    for head in range(3):
        silence(model.attention, head)
    _, report = compact(model, x)
    assert report.widths["attention"] == (3, 1)
    assert report.kept == ["attention: head 0 stays: all are zero"]
    special = Wrapped(add_bias_kv=True)
    silence(special.attention, 1)
    _, report = compact(special, x)
    assert report.kept == ["attention: head 1 stays: the layer has more than its projections"]


def test_weights_of_attention_that_are_an_output_keep_the_heads() -> None:
    class Both(Wrapped):
        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x)

    model = Both()
    silence(model.attention, 1)
    _, report = compact(model, torch.randn(5, 2, 12))
    assert report.widths["attention"] == (3, 3)
    assert report.kept == ["attention: head 1 stays: the weights of attention, over all heads, are used"]
