"""Plain training loop: `python examples/plain.py`; `--resume` continues from the last checkpoint.

It shows parameter groups with their own penalties and learning rates, lr and momentum annealed together, a warm-up
of the strengths, automatic mixed precision, and checkpoints of everything. Needs `pip install scikit-learn`.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import proxmo
from proxmo.progress import Progress

EPOCHS = 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(folder: Path, until: int = EPOCHS, resume: bool = False) -> None:
    """Train until an epoch, from scratch or from the checkpoint in ``folder``."""
    digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits[0] / 16, dtype=torch.float32).to(DEVICE), torch.tensor(digits[1]).to(DEVICE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(DEVICE)
    hidden = proxmo.param_groups(model[0], proxmo.GroupL2(0.02))  # zeroes whole neurons
    head = [{**group, "lr": 0.2} for group in proxmo.param_groups(model[2], proxmo.L1(1e-3))]  # zeroes single weights
    optimizer = proxmo.ProxSGD([*hidden, *head], lr=1.0, momentum=0.9)
    steps = EPOCHS * -(-len(labels) // 64)
    rates = proxmo.RateScheduler(optimizer, proxmo.CosineRates(lr=1.0, momentum=0.9, horizon=steps))
    strengths = proxmo.StrengthScheduler(optimizer, lambda step: min(1.0, 2 * step / steps))
    components = {"model": model, "optimizer": optimizer, "rates": rates, "strengths": strengths}
    first = 0
    if resume:
        checkpoint = torch.load(folder / "plain.pt", weights_only=True)
        first = checkpoint["epoch"]
        for name, component in components.items():
            component.load_state_dict(checkpoint[name])

    for epoch in range(first, until):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))  # the same after --resume
        batches = order.to(DEVICE).split(64)
        with Progress(len(batches), f"epoch {epoch + 1}") as progress:  # on a terminal only
            progress.show(zeros=lambda: f"{optimizer.sparsity()[0].zeros:.0%}")
            progress.show(neurons=lambda: f"{1 - optimizer.sparsity()[0].groups:.0%}")
            for batch in progress.over(batches):
                optimizer.zero_grad()
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                rates.step()
                strengths.step()
                progress.show(loss=loss.item)
        torch.save(
            {"epoch": epoch + 1, **{name: component.state_dict() for name, component in components.items()}},
            folder / "plain.pt",
        )
        if epoch % 3 == 2:
            zero = optimizer.sparsity()[0].groups
            print(f"epoch {epoch + 1}: loss {loss:.3f}, {zero:.0%} of the hidden neurons are zero", flush=True)


if __name__ == "__main__":
    train(Path.cwd(), resume="--resume" in sys.argv)
