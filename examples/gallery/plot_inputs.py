"""
Which inputs matter? Group lasso on the first layer
===================================================

A network ignores an input if all weights of the first layer that read it are zero. A penalty with one group per input
therefore selects inputs while the network trains. A trimmed penalty selects as many as you ask for.

*What proxmo adds*: you set the number of inputs instead of a strength, for any network and any loss. *The usual tools*:
`LassoNet <https://github.com/lasso-net/lassonet>`_, a network with a skip layer that decides which inputs may be used;
scikit-learn's ``SelectKBest`` in front of a network; or an ℓ1 logistic regression.
"""

# %%
# The task: recognise scikit-learn's digits from few of their 64 pixels.

import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from lassonet import LassoNetClassifier
from sklearn.datasets import load_digits
from sklearn.feature_selection import SelectKBest, mutual_info_classif
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import nn

import proxmo

pixels, labels = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split((pixels / 16).astype(np.float32), labels, train_size=1000, random_state=0)
STEPS, COUNTS = 600, (4, 8, 16, 32)


def train(X: np.ndarray, keep: int | None = None, seed: int = 0) -> nn.Module:
    """Train a network with 100 hidden units; with ``keep``, on that many inputs of its own choice."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(X.shape[1], 100), nn.ReLU(), nn.Linear(100, 10))
    groups = [{"params": [model[0].weight], "penalty": None}, {"params": [model[0].bias, *model[2].parameters()]}]
    if keep is not None:
        groups[0]["penalty"] = proxmo.Trimmed(proxmo.GroupL2(0.0, dim=1), keep=1.0)  # dim=1: one group per input
    optimizer = proxmo.ProxSGD(groups, lr=0.5)
    schedulers = [proxmo.RateScheduler(optimizer, proxmo.CosineRates(lr=0.5, momentum=0.9, horizon=STEPS))]
    if keep is not None:
        schedulers.append(proxmo.KeepScheduler(optimizer, keep=keep / X.shape[1], horizon=STEPS))
    inputs, targets = torch.tensor(X), torch.tensor(y)
    for batch in torch.randint(len(y), (STEPS, 64)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return model


def accuracy(model: nn.Module, X_test: np.ndarray) -> float:
    return 100 * (model(torch.tensor(X_test)).argmax(1).numpy() == y_test).mean()


# %%
# proxmo selects 4, 8, 16 and 32 pixels during training:

curves: dict[str, list[tuple[int, float]]] = {}
chosen = {keep: train(X, keep) for keep in COUNTS}
assert all(int(model[0].weight.any(0).sum()) == keep for keep, model in chosen.items())
curves["proxmo: trimmed ℓ2,1"] = [(keep, accuracy(model, X_test)) for keep, model in chosen.items()]

# %%
# The other methods rank the pixels, and the same network is trained on the best ones. LassoNet ranks pixels by the
# strength at which they leave its path. To keep this script short, the path starts where the first pixels leave, and
# uses 20 iterations per strength instead of 100.

lassonet = LassoNetClassifier(
    hidden_dims=(100,), n_iters=(300, 20), lambda_start=350, random_state=0, torch_seed=0, verbose=0
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lassonet.path(X, y)
rankings = {
    "LassoNet, then a network": lassonet.feature_importances_.numpy(),
    "SelectKBest, then a network": mutual_info_classif(X, y, random_state=0),
}
for label, scores in rankings.items():
    curves[label] = []
    for keep in COUNTS:
        selection = SelectKBest(lambda X, y: scores, k=keep).fit(X, y)  # noqa: B023
        curves[label].append((keep, accuracy(train(selection.transform(X)), selection.transform(X_test))))

# %%
# ℓ1 logistic regression: each of the ten classes selects its own pixels; the plot counts their union.

linear = []
for C in (0.01, 0.02, 0.05, 0.1, 0.2):
    model = LogisticRegression(l1_ratio=1.0, C=C, solver="saga", max_iter=100, tol=1e-2).fit(X, y)
    linear.append((int(model.coef_.any(0).sum()), 100 * model.score(X_test, y_test)))
curves["ℓ1 logistic regression"] = [point for point in linear if 3 <= point[0] <= 40]

# %%
# There is one seed per method, so differences of a point or two mean nothing.

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained", width_ratios=(2, 1))
for (label, points), style in zip(curves.items(), ("o-", "s--", "d--", "v:"), strict=True):
    left.plot(*zip(*points, strict=True), style, label=label)
    print(f"{label:30s}", ", ".join(f"{count}: {score:.1f}%" for count, score in points))
left.set(xscale="log", xlabel="pixels in use", ylabel="test accuracy, %")
left.set_xticks([4, 8, 16, 32], [4, 8, 16, 32])
left.minorticks_off()
left.legend()
right.imshow(chosen[16][0].weight.detach().norm(dim=0).reshape(8, 8), cmap="viridis")
right.set_title("the 16 pixels that proxmo chose")
right.axis("off")
plt.show()
