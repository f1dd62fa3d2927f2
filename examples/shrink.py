"""Shrink a network to a tenth of its units in one call, check it, save it.

Run `python examples/shrink.py` after `pip install 'proxmo[compact]' scikit-learn`; it takes seconds on a laptop.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import proxmo

digits = load_digits(return_X_y=True)
images, labels = torch.tensor(digits[0] / 16, dtype=torch.float32), torch.tensor(digits[1])
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


def train_dense(model: nn.Module, loader: DataLoader, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


torch.manual_seed(0)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=64, shuffle=True)
model = make_model()
train_dense(model, loader, epochs=10)
loss = nn.functional.cross_entropy
small, report = proxmo.shrink(model, loss, loader, keep=0.1, epochs=20, evaluate=accuracy)
print(report)
print(small)
proxmo.save_compact(small, "small.safetensors")
loaded = proxmo.load_compact(make_model(), "small.safetensors")
print(f"accuracy {accuracy(model):.1%} before, {accuracy(small):.1%} after, {accuracy(loaded):.1%} from the file")
