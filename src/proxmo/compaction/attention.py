"""Heads of attention: which are zero, and a layer with fewer of them.

`nn.MultiheadAttention` splits its whole width among its heads, so that it cannot have fewer and keep the width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxmo.compaction.dataflow import Dataflow, runs_forward_of


class PrunedMultiheadAttention(nn.Module):
    """Attention as `nn.MultiheadAttention` computes it, with any number of heads of any width.

    Args:
        embed_dim: width of queries and outputs.
        num_heads: how many heads.
        head_dim: the width of each.
        kdim, vdim: widths of keys and values.
        bias: whether the projections have one.
        dropout: of the attention weights, in training.
        batch_first: whether inputs are (batch, time, width) rather than (time, batch, width).

    >>> options = {"kdim": 8, "vdim": 8, "bias": True, "dropout": 0.0, "batch_first": True}
    >>> attention = PrunedMultiheadAttention(8, num_heads=1, head_dim=4, **options)
    >>> x = torch.zeros(2, 5, 8)
    >>> attention(x, x, x)[0].shape
    torch.Size([2, 5, 8])
    """

    # what torch's Transformer layers ask for; with these values they do not take their shortcut around forward
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
        """A layer for the inputs and outputs of another, with its device, dtype and mode."""
        bias = layer.in_proj_bias is not None
        made = cls(layer.embed_dim, num_heads, head_dim, layer.kdim, layer.vdim, bias, layer.dropout, layer.batch_first)
        return made.to(layer.out_proj.weight).train(layer.training)

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
        """As `nn.MultiheadAttention.forward`; a mask for each head is refused, since heads are missing."""
        if attn_mask is not None and attn_mask.dim() != 2:
            raise ValueError(f"attn_mask must have 2 axes where heads are missing, got shape {tuple(attn_mask.shape)}")
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
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, weights

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)


def _additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as numbers to add to the scores; in a mask of booleans, true means left out."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def head_removal_obstacle(layer: nn.MultiheadAttention, dataflow: Dataflow, shared: set[Tensor]) -> str | None:
    """Why no head of a layer can be removed, if so."""
    if not runs_forward_of(layer, nn.MultiheadAttention):
        return f"a {type(layer).__name__} with a forward or hooks of its own is not known"
    if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
        return "the layer has more than its projections"
    if dataflow.call_counts.get(layer, 0) != 1:
        return f"the layer is used {dataflow.call_counts.get(layer, 0)} times"
    if any(p in shared for p in layer.parameters()):
        return "a weight of the layer is shared"
    if layer in dataflow.attention_weights_used:
        return "the weights of attention, over all heads, are used"
    return None


def replace_attention(model: nn.Module, name: str, layer: PrunedMultiheadAttention) -> None:
    """Put a layer with fewer heads where one of torch was."""
    model.set_submodule(name, layer)
    parts = name.split(".")
    for end in range(len(parts)):
        holder = model.get_submodule(".".join(parts[:end]))
        if isinstance(holder, nn.TransformerEncoder):  # its nested tensors are for the layers of torch alone
            holder.enable_nested_tensor = holder.use_nested_tensor = False


def head_rows(layer: nn.MultiheadAttention) -> dict[str, list[list[int]]]:
    """For each parameter of the input projections the rows of each head."""
    width, heads = layer.head_dim, layer.num_heads
    own = [list(range(head * width, (head + 1) * width)) for head in range(heads)]
    joint = [[part * layer.embed_dim + row for part in range(3) for row in rows] for rows in own]
    separate = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), own)
    rows = {**separate, "in_proj_weight": joint, "in_proj_bias": joint}
    return {name: of_heads for name, of_heads in rows.items() if getattr(layer, name) is not None}


def zero_heads(layer: nn.MultiheadAttention) -> tuple[list[int], list[int]]:
    """The heads that add nothing to the output, and those whose values are zero but for a bias.

    The bias counts only where a place attends to anything: weights of attention need not add up to one under a mask.
    """
    weight, bias = _input_projections(layer)[2]
    zero = (weight.detach().reshape(layer.num_heads, -1) == 0).all(1)
    biased = torch.zeros_like(zero) if bias is None else bias.detach().reshape(layer.num_heads, -1).any(1)
    columns = layer.out_proj.weight.detach().reshape(-1, layer.num_heads, layer.head_dim)
    unread = (columns == 0).all(2).all(0)
    nothing = unread | (zero & ~biased)
    return nothing.nonzero().flatten().tolist(), (zero & ~nothing).nonzero().flatten().tolist()


@torch.no_grad()
def remove_heads(layer: nn.MultiheadAttention, heads: list[int]) -> PrunedMultiheadAttention:
    """A layer without these heads."""
    kept = [head for head in range(layer.num_heads) if head not in heads]
    slim = PrunedMultiheadAttention.like(layer, len(kept), layer.head_dim)
    rows = torch.tensor([head * layer.head_dim + row for head in kept for row in range(layer.head_dim)])
    rows = rows.to(layer.out_proj.weight.device)
    for (weight, bias), projection in zip(
        _input_projections(layer), (slim.q_proj, slim.k_proj, slim.v_proj), strict=True
    ):
        projection.weight.copy_(weight[rows])
        if bias is not None:
            projection.bias.copy_(bias[rows])
    slim.out_proj.weight.copy_(layer.out_proj.weight[:, rows])
    if layer.out_proj.bias is not None:
        slim.out_proj.bias.copy_(layer.out_proj.bias)
    return slim.requires_grad_(any(p.requires_grad for p in layer.parameters()))


def _input_projections(layer: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias for queries, keys and values."""
    if layer.in_proj_weight is not None:
        weights = list(layer.in_proj_weight.chunk(3))
    else:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    biases = [None] * 3 if layer.in_proj_bias is None else list(layer.in_proj_bias.chunk(3))
    return list(zip(weights, biases, strict=True))
