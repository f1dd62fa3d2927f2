"""Let a network find its own size: train with a penalty on whole units, remove the zero units, compare, save.

Run `python examples/autosize.py` after `pip install 'proxmo[compact]' scikit-learn`; it takes seconds on a laptop.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import proxmo

digits = load_digits(return_X_y=True)
images, labels = torch.tensor(digits[0] / 16, dtype=torch.float32), torch.tensor(digits[1])
train, test = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tensor_split([1400])


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def accuracy(model: nn.Module) -> float:
    return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


def milliseconds(*models: nn.Module) -> list[float]:
    """Return the median time of each model on the training images, measured alternately."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(50):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model(images[train])
            taken.append(1000 * (time.perf_counter() - start))
    return [sorted(taken)[25] for taken in times]


torch.manual_seed(0)
model = make_model()
print(groups := proxmo.unit_groups(model, images[:2], proxmo.GroupL2(0.003)))
optimizer = proxmo.ProxSGD(groups, lr=1.0, momentum=0.9)
scheduler = proxmo.RateScheduler(optimizer, proxmo.CosineRates(lr=1.0, momentum=0.9, horizon=60 * len(train.split(64))))
with proxmo.progress.Progress(60, "train") as progress:  # a line on the terminal, nothing in a log
    progress.show(units=lambda: f"{1 - optimizer.sparsity()[0].groups:.0%}", accuracy=lambda: accuracy(model))
    for _ in progress.over(range(60)):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            (loss := nn.functional.cross_entropy(model(images[batch]), labels[batch])).backward()
            optimizer.step()
            scheduler.step()
        progress.show(loss=loss.item)
small, report = proxmo.compact(model, images[:2])
print(report)
proxmo.save_compact(small, "small.safetensors")
loaded = proxmo.load_compact(make_model(), "small.safetensors")
with torch.no_grad():
    print(f"accuracy {accuracy(model):.1%} before, {accuracy(small):.1%} after, {accuracy(loaded):.1%} from the file")
    dense, compacted = milliseconds(model, small)
print(f"{dense / compacted:.1f} times faster")
