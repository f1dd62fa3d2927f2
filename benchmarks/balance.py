"""Count the heads and neurons that a penalty leaves, with and without `balance`: `python -m benchmarks.balance`.

A transformer with two blocks of 4 heads and 256 neurons reads the digits of scikit-learn row by row. It is trained with
ℓ2,1 on whole units and compacted.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from proxmo import GroupL2, ProxSGD, compact, unit_groups

EPOCHS = 25


class Transformer(nn.Module):
    """Classifies images by the mean over their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.position = nn.Parameter(0.1 * torch.randn(8, 64))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, **options) for _ in range(2)))  # type: ignore[arg-type]
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(images) + self.position).mean(1))
        return logits


def run(strength: float, balance: bool, epochs: int = EPOCHS) -> str:
    """Train a transformer and return a row of the table."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 8, 8), torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    torch.manual_seed(0)
    model = Transformer()
    groups = unit_groups(model, images[:2], GroupL2(strength), balance=balance)
    optimizer = ProxSGD(groups, lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epochs * 2 // 3], gamma=0.1)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        scheduler.step()
    left = {family.name: family.units - family.zero for part in optimizer.sparsity() for family in part.families}
    heads, neurons = (
        " + ".join(str(count) for name, count in left.items() if name.endswith(kind))
        for kind in ("self_attn", "linear1")
    )
    small, report = compact(model.eval(), images[:2])
    with torch.no_grad():
        accuracy = (small(images[test]).argmax(1) == labels[test]).double().mean()
    return f"| {strength:g} | {balance} | {heads} | {neurons} | {report.parameters[1]:,} | {accuracy:.1%} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.005, 0.01])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| strength | balance | heads, of 4 + 4 | neurons, of 256 + 256 | parameters, of 101,706 | test accuracy |")
    print("|---|---|---|---|---|---|")
    for strength in chosen.strengths:
        for balance in (False, True):
            print(run(strength, balance, chosen.epochs), flush=True)


if __name__ == "__main__":
    main()
