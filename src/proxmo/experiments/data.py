"""The data sets: the digits of scikit-learn, CIFAR-10 and Fashion-MNIST."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from proxmo.experiments.images import Images, Split

CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILES = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # from Debian's package dataset-fashion-mnist


class DataError(RuntimeError):
    """The data are missing, damaged or unreachable; the message says what to do."""


def default_root() -> Path:
    """Return the folder of fetched data: ``$PROXMO_DATA``, or a folder in the user's cache."""
    given = os.environ.get("PROXMO_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "proxmo"


def load(name: str, root: Path | None = None) -> Images:
    """Load a data set from this machine; `fetch.fetch_cifar10` downloads CIFAR-10.

    Args:
        name: ``"digits"``, ``"cifar10"`` or ``"fashion-mnist"``.
        root: the folder that CIFAR-10 was fetched to, or the folder of the Fashion-MNIST files; ``None`` for the
            default.

    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test), digits.train.images.shape[1:]
    (1437, 360, torch.Size([8, 8, 1]))
    """
    if name not in LOADERS:
        raise ValueError(f"name must be one of {', '.join(LOADERS)}, got {name!r}")
    return LOADERS[name](root)


def _digits(_: Path | None) -> Images:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images * 15, dtype=torch.uint8)[..., None]
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return Images("digits", Split(images[train], labels[train]), Split(images[test], labels[test]), 10, 1, flip=False)


def _cifar10(root: Path | None) -> Images:
    root = root or default_root()
    folder = root / CIFAR10_FOLDER
    parts = []
    for name, md5 in CIFAR10_FILES.items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise DataError(
                f"CIFAR-10 is not in {folder}: {name} cannot be read ({error.strerror}). "
                f"Fetch it with `proxmo data cifar10 --root {root}`, or put the six .bin files of the binary version "
                "there by hand"
            ) from error
        if hashlib.md5(content).hexdigest() != md5:
            raise DataError(f"{folder / name} is damaged: its md5 is not {md5}. Delete it and fetch it again")
        parts.append(_cifar_records(content))
    train = Split(torch.cat([part.images for part in parts[:5]]), torch.cat([part.labels for part in parts[:5]]))
    return Images("cifar10", train, parts[5], 10, padding=4, flip=True)


def _cifar_records(content: bytes) -> Split:
    """Decode records of a label and 3 × 32 × 32 pixels each."""
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, 3073)
    images = records[:, 1:].reshape(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous()
    return Split(images, records[:, 0].long())


def _fashion_mnist(root: Path | None) -> Images:
    folder = root or FASHION_FOLDER
    train, test = (
        Split(
            _idx(folder / f"{part}-images-idx3-ubyte.gz")[..., None],
            _idx(folder / f"{part}-labels-idx1-ubyte.gz").long(),
        )
        for part in ("train", "t10k")
    )
    return Images("fashion-mnist", train, test, 10, padding=2, flip=True)


def _idx(path: Path) -> torch.Tensor:
    """Read an array in the IDX format: two zeros, the type 8 (bytes), the number of axes, their lengths, the data."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"Fashion-MNIST is not in {path.parent}: {path.name} is missing; install Debian's dataset-fashion-mnist"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
    data = content[4 + 4 * axes :]
    if axes == 0 or len(data) != int(np.prod(shape)):
        raise DataError(f"{path} is damaged: it is not an IDX file of bytes")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


LOADERS: dict[str, Callable[[Path | None], Images]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "fashion-mnist": _fashion_mnist,
}
