"""
Mixture weights on the simplex: a small ensemble
================================================

An ensemble averages the probabilities of several models with weights that are non-negative and sum to one. Which
weights are best on held-out data? This is an optimization problem on the simplex, and its solution is sparse: most
models get a weight of exactly zero, so you need not run them at all.

*What proxmo adds*: the simplex as a constraint of a torch optimizer, per parameter group. *The usual tools*: weights
through a softmax, which are never zero, or equal weights as in scikit-learn's ``VotingClassifier``.
"""

# %%
# Twenty-five small scikit-learn models, each trained on a part of the digits:

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.tree import DecisionTreeClassifier

import proxmo

images, labels = load_digits(return_X_y=True)
images, rest, labels, rest_labels = train_test_split(images / 16, labels, train_size=600, random_state=0)
held_out, test, held_out_labels, test_labels = train_test_split(rest, rest_labels, train_size=500, random_state=0)

kinds = {
    "trees": lambda i: ExtraTreesClassifier(10, random_state=i),
    "neighbours": lambda i: KNeighborsClassifier(3 + 4 * i),
    "linear": lambda i: LogisticRegression(C=10.0 ** (1 - i), max_iter=500),
    "one tree": lambda i: DecisionTreeClassifier(max_depth=4 + 2 * i, random_state=i),
    "naive Bayes": lambda i: GaussianNB(var_smoothing=10.0 ** (-1 - i)),
}
random = np.random.default_rng(0)
names, models = [], []
for kind, make in kinds.items():
    for i in range(5):
        part = random.choice(len(images), 300, replace=False)
        names.append(kind)
        models.append(make(i).fit(images[part], labels[part]))


def probabilities(inputs: np.ndarray) -> torch.Tensor:
    """Models x samples x classes."""
    return torch.tensor(np.stack([model.predict_proba(inputs) for model in models]), dtype=torch.float32)


P, P_test = probabilities(held_out), probabilities(test)
y, y_test = torch.tensor(held_out_labels), torch.tensor(test_labels)


def log_loss(weights: torch.Tensor, P: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mixture = torch.einsum("m,mnc->nc", weights, P)
    return -(mixture[torch.arange(len(y)), y] + 1e-6).log().mean()


# %%
# Weights on the simplex need one parameter and one constraint. The gradient is exact here, so momentum is not needed.

weights = torch.nn.Parameter(torch.full((len(models),), 1 / len(models)))
optimizer = proxmo.ProxSGD([weights], lr=0.05, momentum=0.0, penalty=proxmo.Simplex())
simplex_path = []
for _ in range(600):
    optimizer.zero_grad()
    loss = log_loss(weights, P, y)
    loss.backward()
    optimizer.step()
    simplex_path.append(loss.item())

# %%
# The same through a softmax, with Adam:

scores = torch.nn.Parameter(torch.zeros(len(models)))
adam = torch.optim.Adam([scores], lr=0.05)
softmax_path = []
for _ in range(600):
    adam.zero_grad()
    loss = log_loss(scores.softmax(0), P, y)
    loss.backward()
    adam.step()
    softmax_path.append(loss.item())

ways = {
    "equal weights": torch.full((len(models),), 1 / len(models)),
    "softmax": scores.softmax(0).detach(),
    "simplex": weights.detach(),
}
for way, w in ways.items():
    accuracy = (torch.einsum("m,mnc->nc", w, P_test).argmax(1) == y_test).float().mean()
    print(
        f"{way:14s} sum {w.sum():.4f}, {int((w > 0).sum()):2d} models, log-loss {log_loss(w, P, y):.4f} held out, "
        f"{log_loss(w, P_test, y_test):.4f} test, accuracy {accuracy:.1%}"
    )

# %%
# Both methods reach the same loss. The simplex names the models that matter; with the softmax you have to choose a
# threshold.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
left.plot(simplex_path, label="simplex, ProxSGD")
left.plot(softmax_path, "--", label="softmax, Adam")
left.set(xlabel="step", ylabel="log-loss, held-out data", yscale="log")
left.legend()
positions = np.arange(len(models))
right.bar(positions - 0.2, ways["simplex"], 0.4, label=f"simplex: {int((weights > 0).sum())} models")
right.bar(positions + 0.2, ways["softmax"], 0.4, label=f"softmax: {len(models)} models")
right.set_xticks(range(2, len(models), 5), kinds)
right.set(ylabel="weight")
right.legend()
plt.show()
