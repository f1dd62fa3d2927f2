"""
A small transformer loses heads and neurons
===========================================

A byte-level transformer learns to predict the source code of Python's standard library, while ``ProxAdamW`` removes
three quarters of its attention heads and neurons.

*What proxmo adds*: AdamW with a prox in Adam's own metric, and attention heads as groups of a penalty. *The usual way*:
train with AdamW, cut the heads and neurons of smallest norm, and continue training.
"""

import glob
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import proxmo

STEPS, LENGTH = 200, 48
sources = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))
source = bytearray(b"".join(Path(name).read_bytes() for name in sources))
text = torch.frombuffer(source, dtype=torch.uint8).long() % 128
print(f"{len(text):,} bytes")


class Model(nn.Module):
    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        make = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x)


def batch(generator: torch.Generator, part: slice, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    data = text[part]
    starts = torch.randint(len(data) - LENGTH - 1, (size,), generator=generator)
    rows = data[starts[:, None] + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


TRAIN, TEST = slice(0, len(text) * 9 // 10), slice(len(text) * 9 // 10, None)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def test_loss(model: nn.Module) -> float:
    return loss_of(model.eval(), *batch(torch.Generator().manual_seed(1), TEST, size=256)).item()


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedulers: list, steps: int, seed: int, watch=None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(generator, TRAIN)).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        if watch is not None and step % 10 == 9:
            watch()


# %%
# ``unit_groups`` finds the heads and neurons. Each kind has its own trimmed penalty and keeps its own share.

torch.manual_seed(0)
model = Model()
example = batch(torch.Generator().manual_seed(2), TRAIN, size=2)[0]
groups = proxmo.unit_groups(model, example, proxmo.Trimmed(proxmo.GroupL2(1.0), keep=1.0, scope="each"))
print(*groups.notes, sep="\n")
optimizer = proxmo.ProxAdamW(groups, lr=3e-3, weight_decay=0.0)
schedulers = [
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    proxmo.KeepScheduler(optimizer, keep=0.25, horizon=STEPS),
]
alive: list[dict[str, int]] = []


def count() -> None:
    families = [family for sparsity in optimizer.sparsity() for family in sparsity.families]
    alive.append({family.name: family.units - family.zero for family in families})


fit(model, optimizer, schedulers, STEPS, seed=0, watch=count)
small, report = proxmo.compact(model.eval(), example)
print(report)
removed = test_loss(small)

# %%
# The usual way with the same number of steps: AdamW for two thirds of them, then a cut to the same sizes, then AdamW
# for the remaining steps.

torch.manual_seed(0)
dense = Model()
adamw = torch.optim.AdamW(dense.parameters(), lr=3e-3, weight_decay=0.0)
fit(dense, adamw, [torch.optim.lr_scheduler.CosineAnnealingLR(adamw, STEPS)], STEPS, seed=0)

torch.manual_seed(0)
pruned = Model()
adamw = torch.optim.AdamW(pruned.parameters(), lr=3e-3, weight_decay=0.0)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, STEPS)
fit(pruned, adamw, [cosine], STEPS * 2 // 3, seed=0)
cut = proxmo.ProxSGD(
    proxmo.unit_groups(pruned, example, proxmo.Trimmed(proxmo.GroupL2(1e10), keep=0.25, scope="each")), lr=1.0
)
for p in pruned.parameters():
    p.grad = torch.zeros_like(p)
cut.step()  # with zero gradients, this step is a projection
proxmo.freeze_zeros(adamw)
fit(pruned, adamw, [cosine], STEPS - STEPS * 2 // 3, seed=1)

losses = {
    "AdamW, dense": test_loss(dense),
    "ProxAdamW": removed,
    "AdamW, cut, AdamW": test_loss(proxmo.compact(pruned.eval(), example)[0]),
}
for way, value in losses.items():
    print(f"{way:18s} {value:.3f}")

# %%
# The plot shows the test loss in nats per byte, for one seed and a very short run.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
steps = range(10, STEPS + 1, 10)
for name in alive[0]:
    whole = alive[0][name]
    kind = "heads" if "attn" in name else "neurons"
    left.plot(steps, [entry[name] / whole for entry in alive], label=f"{name}: {whole} to {alive[-1][name]} {kind}")
left.set(xlabel="step", ylabel="share that is left", ylim=(0, 1.05))
left.legend(fontsize=8)
bars = right.barh(list(losses), list(losses.values()), color=["black", "tab:orange", "tab:blue"])
right.bar_label(bars, fmt="%.3f", label_type="center", color="white")
right.set(xlabel="test loss")
right.invert_yaxis()
plt.show()
