"""Find zero attention heads, and replace `nn.MultiheadAttention` with a layer that has fewer heads.

`nn.MultiheadAttention` cannot do so itself: its embedding dimension is always split among all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo.compaction.dataflow import Dataflow, runs_forward_of


class PrunedMultiheadAttention(nn.Module):
    """Attention as in `nn.MultiheadAttention`, with any number of heads of any size.

    Args:
        embed_dim: size of queries and outputs.
        num_heads: number of heads.
        head_dim: size of each head.
        kdim, vdim: sizes of keys and values.
        bias: whether the projections have a bias.
        dropout: dropout probability of the attention weights in training.
        batch_first: whether inputs have shape (batch, time, size) rather than (time, batch, size).

    >>> options = {"kdim": 8, "vdim": 8, "bias": True, "dropout": 0.0, "batch_first": True}
    >>> attention = PrunedMultiheadAttention(8, num_heads=1, head_dim=4, **options)
    >>> x = torch.zeros(2, 5, 8)
    >>> attention(x, x, x)[0].shape
    torch.Size([2, 5, 8])
    """

    # torch's Transformer layers read these attributes; with these values they do not take their fast path
    in_proj_bias = None
    in_proj_weight = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        kdim: int,
        vdim: int,
        bias: bool,
        dropout: float,
        batch_first: bool,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.dropout, self.batch_first = dropout, batch_first
        inner = num_heads * head_dim
        self.q_proj = nn.Linear(embed_dim, inner, bias)
        self.k_proj = nn.Linear(kdim, inner, bias)
        self.v_proj = nn.Linear(vdim, inner, bias)
        self.out_proj = nn.Linear(inner, embed_dim, bias)

    @classmethod
    def like(cls, layer: nn.MultiheadAttention, num_heads: int, head_dim: int) -> PrunedMultiheadAttention:
        """Return a layer with the input and output sizes, device, dtype and mode of ``layer``."""
        bias = layer.in_proj_bias is not None
        new = cls(layer.embed_dim, num_heads, head_dim, layer.kdim, layer.vdim, bias, layer.dropout, layer.batch_first)
        return new.to(layer.out_proj.weight).train(layer.training)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, batch_first={self.batch_first}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Same as `nn.MultiheadAttention.forward`, except that masks per head are refused."""
        if attn_mask is not None and attn_mask.dim() != 2:
            raise ValueError(f"attn_mask must be 2-D since heads were removed, got shape {tuple(attn_mask.shape)}")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q = self._split_heads(self.q_proj(query))
        k = self._split_heads(self.k_proj(key))
        v = self._split_heads(self.v_proj(value))
        mask = _additive_mask(attn_mask, q.dtype)
        padding = _additive_mask(key_padding_mask, q.dtype)
        if padding is not None:
            padding = padding.reshape(-1, 1, 1, padding.shape[-1])
            mask = padding if mask is None else mask + padding
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        output: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not batched:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, weights

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)


def _additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask to add to the scores; in a boolean mask, true positions are ignored."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def head_removal_obstacle(layer: nn.MultiheadAttention, dataflow: Dataflow, shared: set[Tensor]) -> str | None:
    """Return why no head of the layer can be removed, or ``None``."""
    if not runs_forward_of(layer, nn.MultiheadAttention):
        return f"the {type(layer).__name__} has its own forward or hooks"
    if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
        return "the layer uses add_bias_kv or add_zero_attn"
    if dataflow.call_counts.get(layer, 0) != 1:
        return f"the layer is called {dataflow.call_counts.get(layer, 0)} times"
    if any(p in shared for p in layer.parameters()):
        return "a weight of the layer is shared"
    if layer in dataflow.attention_weights_used:
        return "the model uses its attention weights"
    return None


def replace_attention(model: nn.Module, name: str, layer: PrunedMultiheadAttention) -> None:
    """Replace the attention layer ``name`` of the model."""
    model.set_submodule(name, layer)
    parts = name.split(".")
    for end in range(len(parts)):
        ancestor = model.get_submodule(".".join(parts[:end]))
        if isinstance(ancestor, nn.TransformerEncoder):  # nested tensors work with nn.MultiheadAttention only
            ancestor.enable_nested_tensor = ancestor.use_nested_tensor = False


def head_rows(layer: nn.MultiheadAttention) -> dict[str, list[list[int]]]:
    """Return the rows of each head, for each parameter of the input projections."""
    size, heads = layer.head_dim, layer.num_heads
    separate = [list(range(head * size, (head + 1) * size)) for head in range(heads)]
    packed = [[part * layer.embed_dim + row for part in range(3) for row in rows] for rows in separate]
    rows_by_name = {
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), separate),
        **dict.fromkeys(("in_proj_weight", "in_proj_bias"), packed),
    }
    return {name: rows for name, rows in rows_by_name.items() if getattr(layer, name) is not None}


def zero_heads(layer: nn.MultiheadAttention) -> tuple[list[int], list[int]]:
    """Return the heads that add nothing to the output, and those whose values are a nonzero bias only.

    The latter cannot be folded into a constant: under a mask, attention weights need not sum to one.
    """
    weight, bias = _input_projections(layer)[2]
    zero = (weight.detach().reshape(layer.num_heads, -1) == 0).all(1)
    biased = torch.zeros_like(zero) if bias is None else bias.detach().reshape(layer.num_heads, -1).any(1)
    columns = layer.out_proj.weight.detach().reshape(-1, layer.num_heads, layer.head_dim)
    unread = (columns == 0).all(2).all(0)
    without_effect = unread | (zero & ~biased)
    return without_effect.nonzero().flatten().tolist(), (zero & ~without_effect).nonzero().flatten().tolist()


@torch.no_grad()
def remove_heads(layer: nn.MultiheadAttention, heads: list[int]) -> PrunedMultiheadAttention:
    """Return a layer without these heads."""
    kept = [head for head in range(layer.num_heads) if head not in heads]
    pruned = PrunedMultiheadAttention.like(layer, len(kept), layer.head_dim)
    rows = torch.tensor([head * layer.head_dim + row for head in kept for row in range(layer.head_dim)])
    rows = rows.to(layer.out_proj.weight.device)
    for (weight, bias), projection in zip(
        _input_projections(layer), (pruned.q_proj, pruned.k_proj, pruned.v_proj), strict=True
    ):
        projection.weight.copy_(weight[rows])
        if bias is not None:
            projection.bias.copy_(bias[rows])
    pruned.out_proj.weight.copy_(layer.out_proj.weight[:, rows])
    if layer.out_proj.bias is not None:
        pruned.out_proj.bias.copy_(layer.out_proj.bias)
    return pruned.requires_grad_(any(p.requires_grad for p in layer.parameters()))


def _input_projections(layer: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of the query, key and value projections."""
    if layer.in_proj_weight is not None:
        weights = list(layer.in_proj_weight.chunk(3))
    else:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    biases = [None] * 3 if layer.in_proj_bias is None else list(layer.in_proj_bias.chunk(3))
    return list(zip(weights, biases, strict=True))
