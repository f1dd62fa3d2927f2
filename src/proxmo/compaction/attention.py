"""Replace `nn.MultiheadAttention` with a layer that has fewer heads.

`nn.MultiheadAttention` cannot do so itself: its embedding dimension is always split among all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

KEEPS_WIDTH = "nn.MultiheadAttention keeps the width of its inputs and outputs"


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
        # time first in memory, as in nn.MultiheadAttention: what torch does with the result depends on the layout
        output: Tensor = self.out_proj(attended.permute(2, 0, 1, 3).flatten(2))
        if not batched:
            output = output.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        return output, weights

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)


def _additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask to add to the scores; in a boolean mask, true positions are ignored."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def attention_obstacles(model: nn.Module) -> dict[tuple[str, int], str]:
    """Return for each axis of each parameter of attention layers why nothing can be removed there, where it cannot."""
    obstacles: dict[tuple[str, int], str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            reason = _attention_obstacle(layer)
            for parameter_name, p in layer.named_parameters():
                makes_outputs = parameter_name.startswith("out_proj.")
                for axis in range(p.dim()):
                    if reason is not None:
                        obstacles[f"{name}.{parameter_name}".lstrip("."), axis] = reason
                    elif (axis == 0) == makes_outputs:
                        obstacles[f"{name}.{parameter_name}".lstrip("."), axis] = KEEPS_WIDTH
    return obstacles


def _attention_obstacle(layer: nn.MultiheadAttention) -> str | None:
    """Return why no head of the layer can be removed, or ``None``."""
    customised = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    if type(layer).forward is not nn.MultiheadAttention.forward or customised:
        return f"the {type(layer).__name__} has its own forward or hooks"
    if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
        return "the layer uses add_bias_kv or add_zero_attn"
    return None


def replace_attention(model: nn.Module, name: str, layer: PrunedMultiheadAttention) -> None:
    """Replace the attention layer ``name`` of the model, under all its names."""
    old = model.get_submodule(name)
    for module in list(model.modules()):
        for child_name, child in list(module._modules.items()):
            if child is old:
                module.add_module(child_name, layer)
    parts = name.split(".")
    for end in range(len(parts)):
        ancestor = model.get_submodule(".".join(parts[:end]))
        if isinstance(ancestor, nn.TransformerEncoder):  # nested tensors work with nn.MultiheadAttention only
            ancestor.enable_nested_tensor = ancestor.use_nested_tensor = False


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
