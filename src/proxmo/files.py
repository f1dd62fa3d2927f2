"""Atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the suffix of ``path`` that replaces ``path`` if the block ends without an error.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with written_whole(folder / "numbers.txt") as temporary:
    ...     _ = temporary.write_text("1 2 3")
    >>> [file.name for file in folder.iterdir()]
    ['numbers.txt']
    """
    if not path.parent.is_dir():  # the error would name the temporary file
        raise FileNotFoundError(f"No such directory: {path.parent}")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("r+b") as written:  # Windows syncs files that are open for writing
            os.fsync(written.fileno())  # otherwise a power cut may keep the name but lose the content
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
