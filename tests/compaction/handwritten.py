"""Models written by hand, as people write them, and inputs of any batch size and length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = Callable[[int, int], tuple[Tensor, ...]]


class Attention(nn.Module):
    """Self-attention by `scaled_dot_product_attention`, with one projection and rotary embeddings by chunk and cat."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.embed, self.norm, self.head = nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.joint, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        batch, length, _ = hidden.shape
        q, k, v = self.joint(self.norm(hidden)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        angles = torch.arange(length, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.5], dtype=x.dtype)
        rotated = (rotate(q, angles), rotate(k, angles), v)
        attended = functional.scaled_dot_product_attention(*rotated, is_causal=True)
        return self.head(hidden + self.out(attended.transpose(1, 2).reshape(batch, length, -1)))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class GroupedQueries(nn.Module):
    """Attention by matmul and softmax, with two heads of keys for four of queries, and RMSNorm with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups, self.size = 4, 2, 4
        self.embedding, self.norm, self.last = nn.Embedding(20, 16), nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16)
        self.q, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.k, self.v = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        normed = self.norm(hidden)
        shape = (*tokens.shape, -1, self.size)
        q = self.q(normed).view(shape).transpose(1, 2)
        k, v = (
            layer(normed).view(shape).transpose(1, 2).repeat_interleave(self.heads // self.groups, 1)
            for layer in (self.k, self.v)
        )
        weights = (q @ k.transpose(-1, -2) / self.size**0.5).softmax(-1)
        hidden = hidden + self.out((weights @ v).transpose(1, 2).flatten(2))
        normed = self.last(hidden)
        hidden = hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return functional.linear(self.last(hidden), self.embedding.weight)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Conv2d(12, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x).relu()
        middle = self.middle(functional.max_pool2d(first, 2)).relu()
        return self.last(torch.cat([first, self.up(middle)], 1).relu())


class MobileBlock(nn.Module):
    """A block as in MobileNetV3: depthwise, squeeze and excitation, hardswish."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(4, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.stem, self.project, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(12, 4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        stem = functional.hardswish(self.stem(x))
        hidden = functional.hardswish(self.depth(functional.hardswish(self.norm(self.expand(stem)))))
        pooled = functional.adaptive_avg_pool2d(hidden, 1)
        hidden = hidden * functional.hardsigmoid(self.excite(self.squeeze(pooled).relu()))
        return self.head((stem + self.project(hidden)).mean((2, 3)))


class ShuffleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 1)
        self.last, self.head = nn.Conv2d(8, 10, 1), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, 1)
        both = torch.cat([left, self.second(self.first(right).relu())], 1)
        batch, channels, *size = both.shape
        shuffled = both.view(batch, 2, channels // 2, *size).transpose(1, 2).reshape(batch, channels, *size)
        return self.head(self.last(shuffled).relu().mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, layer: str, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.middle = getattr(nn, layer)(8, 6, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.last = nn.Linear(12 if bidirectional else 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu())[0])


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.last((adjacency @ self.second((adjacency @ self.first(x)).relu())).relu())


class WrittenSlices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 4), nn.Linear(5, 6), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        split = self.first.out_features
        hidden = x.new_zeros(*x.shape[:-1], split + self.second.out_features)
        hidden[..., :split] = self.first(x).relu()
        hidden[..., split:] = self.second(x).relu()
        return self.last(hidden)


class WithScriptedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 2)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.scripted(self.first(x))).relu())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
        self.embed, self.head = nn.Linear(5, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.head(self.layer(hidden, hidden))


class RotatedByComplexNumbers(nn.Module):
    """Attention with grouped queries, numbers for all counts of heads, and rotations by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_groups, self.n_rep, self.size = 4, 2, 2, 4
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        normed = self.norm(hidden)
        shape = tokens.shape
        q = self.rotate(self.q(normed).view(*shape, self.n_heads, self.size))
        k = self.rotate(self.k(normed).view(*shape, self.n_groups, self.size))
        v = self.v(normed).view(*shape, self.n_groups, self.size)
        q, k, v = q.transpose(1, 2), self.repeat(k), self.repeat(v)
        future = torch.full((shape[1], shape[1]), float("-inf"), dtype=q.dtype).triu(1)
        weights = (q @ k.transpose(2, 3) / self.size**0.5 + future).softmax(-1)
        return self.head(hidden + self.out((weights @ v).transpose(1, 2).contiguous().view(*shape, -1)))

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.tensor([1.0, 0.1], dtype=x.dtype))
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3)

    def repeat(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        repeated = x[:, :, :, None].expand(batch, length, self.n_groups, self.n_rep, self.size)
        return repeated.reshape(batch, length, self.n_groups * self.n_rep, self.size).transpose(1, 2)


class EinsumAttention(nn.Module):
    """Attention whose weights have an axis for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(0.3 * torch.randn(5, 4, 4)) for _ in range(3))
        self.out = nn.Parameter(0.3 * torch.randn(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, weight) for weight in (self.q, self.k, self.v))
        weights = (torch.einsum("bhik,bhjk->bhij", q, k) / 2).softmax(-1)
        return torch.einsum("bhik,hkd->bid", torch.einsum("bhij,bhjk->bhik", weights, v), self.out)


class ConvolutionalLSTM(nn.Module):
    """Four gates by one convolution of the image and the state, which starts as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.gates, self.head = nn.Conv2d(3 + 8, 32, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.width, *x.shape[2:])
        memory = torch.zeros_like(state)
        for _ in range(2):
            enter, forget, leave, new = self.gates(torch.cat([x, state], 1)).chunk(4, 1)
            memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * memory.tanh()
        return self.head(state)


def features(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, length, 5),)


def images(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 2 * length, 2 * length),)


def graph(batch: int, length: int) -> tuple[Tensor, ...]:
    return torch.randn(length, 5), torch.rand(length, length)


def tokens(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 20, (batch, length)),)


def grouped() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU()),
        *(nn.ConvTranspose2d(12, 8, 2, groups=4), nn.Mish(inplace=True), nn.Conv2d(8, 4, 1)),
    )


def activations() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(5, 8), nn.LogSigmoid(), nn.Linear(8, 8), nn.CELU(inplace=True), nn.Linear(8, 8), nn.GLU()),
        *(nn.Linear(4, 8), nn.Hardswish(inplace=True), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 2)),
    )


def upsampling() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2), nn.SiLU(), nn.Conv2d(4, 3, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs, float, float]] = {
    # model, inputs, the least share of parameters in tensors with units, the most that is left
    "attention by hand": (Attention, features, 0.6, 0.5),
    "grouped queries by hand": (GroupedQueries, tokens, 0.8, 0.25),
    "rotary embeddings by complex numbers": (RotatedByComplexNumbers, tokens, 0.5, 0.6),
    "attention by einsum": (EinsumAttention, features, 0.8, 0.3),
    "convolutional LSTM": (ConvolutionalLSTM, images, 0.9, 0.2),
    "U-Net": (UNet, images, 0.7, 0.2),
    "MobileNetV3 block": (MobileBlock, images, 0.9, 0.3),
    "ShuffleNet block": (ShuffleBlock, images, 0.4, 0.7),
    "LSTM": (lambda: Recurrent("LSTM"), features, 0.9, 0.2),
    "GRU, bidirectional": (lambda: Recurrent("GRU", bidirectional=True), features, 0.9, 0.2),
    "RNN": (lambda: Recurrent("RNN"), features, 0.9, 0.2),
    "graph convolution": (GraphNetwork, graph, 0.8, 0.2),
    "written slices": (WrittenSlices, features, 0.7, 0.4),
    "scripted part": (WithScriptedPart, features, 0.4, 0.7),
    "decoder layer of torch": (Decoder, features, 0.5, 0.5),
    "groups": (grouped, images, 0.9, 0.4),
    "activations": (activations, features, 0.9, 0.2),
    "PixelShuffle": (upsampling, images, 0.9, 0.5),
}
