"""
Fill in missing pixels: the nuclear norm
========================================

Two thirds of the pixels of a photograph are missing. Among all matrices that fit the known pixels, the nuclear norm
(the sum of the singular values) prefers those of low rank.

*What proxmo adds*: matrix completion in an ordinary training loop, without choosing the rank. The same penalty on the
weight of a layer gives the layer a low rank. *The usual tools*: a factorisation U·Vᵀ of a chosen rank, trained with
Adam, or scikit-learn's ``KNNImputer``.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from sklearn.impute import KNNImputer

import proxmo

torch.manual_seed(0)
photograph = torch.tensor(load_sample_image("flower.jpg") / 255.0, dtype=torch.float32).mean(2)[::2, ::2]
chance = torch.rand_like(photograph)
known, held_out, missing = chance < 0.3, (chance >= 0.3) & (chance < 1 / 3), chance >= 1 / 3


def error(picture: torch.Tensor, where: torch.Tensor) -> float:
    """Root mean square error, with pixels between 0 and 1."""
    return (picture - photograph)[where].square().mean().sqrt().item()


# %%
# A tenth of the known pixels is held out to choose the strength. The largest strength runs first, and each run starts
# from the result of the previous one. The gradients have no noise, so momentum is not needed.

completed = torch.nn.Parameter(torch.full_like(photograph, photograph[known].mean()))
optimizer = proxmo.ProxSGD([completed], lr=1.0, momentum=0.0, penalty=proxmo.Nuclear(0.0))
path = []
for strength in (4.0, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.13):
    optimizer.param_groups[0]["penalty"].strength = strength
    for _ in range(30):
        optimizer.zero_grad()
        ((completed - photograph)[known].square().sum() / 2).backward()
        optimizer.step()
    path.append((strength, int(torch.linalg.matrix_rank(completed)), completed.detach().clone()))
    print(f"strength {strength}: rank {path[-1][1]}, error {error(path[-1][2], held_out):.4f} on pixels held out")
_, rank, nuclear = min(path, key=lambda entry: error(entry[2], held_out))

# %%
# Factorisations trained with Adam, with rank and weight decay chosen on the same pixels, and the mean of the five
# nearest rows:


def factorise(rank: int, decay: float) -> torch.Tensor:
    torch.manual_seed(0)
    left = torch.nn.Parameter(0.3 * torch.randn(photograph.shape[0], rank))
    right = torch.nn.Parameter(0.3 * torch.randn(photograph.shape[1], rank))
    optimizer = torch.optim.Adam([left, right], lr=0.02)
    for _ in range(250):
        optimizer.zero_grad()
        size = left.square().sum() + right.square().sum()
        ((left @ right.T - photograph)[known].square().sum() / 2 + decay * size / 2).backward()
        optimizer.step()
    return (left @ right.T).detach()


factorised = {(rank, decay): factorise(rank, decay) for rank in (10, 40) for decay in (0.0, 0.1, 0.4)}
for (rank_of_factors, decay), picture in factorised.items():
    print(f"factors of rank {rank_of_factors}, decay {decay}: error {error(picture, held_out):.4f}")
choice = min(factorised, key=lambda setting: error(factorised[setting], held_out))
neighbours = torch.tensor(KNNImputer(n_neighbors=5).fit_transform(photograph.where(known, torch.nan).numpy()))

# %%
# The nuclear norm and a well-chosen factorisation give similar results. There is a reason: weight decay on U and V *is*
# the nuclear norm of U·Vᵀ, if the factors are wide enough. The factorisation is cheaper for large matrices, because it
# needs no singular values. The nuclear norm is convex, has a single number to choose, and finds the rank.

pictures = {
    "one third of the pixels": photograph.where(~missing, 1.0),
    f"nuclear norm, rank {rank}: error {error(nuclear, missing):.3f}": nuclear,
    f"factors of rank {choice[0]}, decay {choice[1]}: {error(factorised[choice], missing):.3f}": factorised[choice],
    f"five nearest rows: {error(neighbours, missing):.3f}": neighbours,
}
figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
for ax, (title, picture) in zip(axes.flat, pictures.items(), strict=True):
    ax.imshow(picture, cmap="gray", vmin=0, vmax=1)
    ax.set_title(title)
    ax.axis("off")
plt.show()
