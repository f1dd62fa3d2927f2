"""A progress line for long work: a bar, the time left and a row of live values, on a terminal only."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from typing_extensions import Self

from proxmo import checks

Item = TypeVar("Item")
Value: TypeAlias = "str | float | Callable[[], str | float]"
"""A number or text to show, or a function that returns one and is called only when the line is drawn."""

INTERVAL = 0.25  # seconds between two drawings
BAR = 24  # characters at most


class Progress:
    """A progress line for a loop, redrawn on the terminal at most four times a second.

    The line goes to standard error, and only if that is a terminal: log files, pipes and notebooks get nothing. Use it
    in a ``with`` statement, which draws the line a last time and ends it, also when the work stops early or fails. It
    starts no thread.

    Args:
        total: the number of steps.
        label: the start of the line.
        shown: ``False`` never shows the line; with several ranks, pass ``rank == 0``.

    >>> with Progress(3, "fit") as progress:
    ...     for batch in progress.over([0.5, 0.25, 0.125]):
    ...         progress.show(loss=batch, zeros=lambda: "84%")
    >>> progress.line()
    'fit ######################## 3/3 in 0:00  loss 0.125  zeros 84%'
    """

    def __init__(self, total: int, label: str = "", *, shown: bool = True) -> None:
        self._total, self._label = checks.count("total", total), label
        self._stream = sys.stderr
        self._shown = bool(shown) and _is_terminal(self._stream)
        self._done, self._ended = 0, False
        self._values: dict[str, Value] = {}
        self._start = time.monotonic()
        self._last_drawn, self._width = self._start, 0

    def __enter__(self) -> Self:
        if self._shown:
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        if self._shown:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over ``items`` and count one step after each."""
        for item in items:
            yield item
            self.advance()

    def advance(self, steps: int = 1) -> None:
        """Count steps that are done."""
        self.reach(self._done + steps)

    def reach(self, steps: int) -> None:
        """Say how many steps are done in all; fewer than before change nothing."""
        self._done = max(self._done, steps)
        if self._shown and time.monotonic() - self._last_drawn >= INTERVAL:
            self._draw()

    def show(self, **values: Value) -> None:
        """Set the values that the line ends with, by name; a function is called only when the line is drawn."""
        self._values.update(values)

    def line(self, width: int = 120) -> str:
        """Return the line as it is drawn now; where ``width`` is too small, first the bar is shorter, then the line."""
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        row = [f" {name} {_format(value)}" for name, value in self._values.items()]
        text = " ".join(filter(None, [f"{self._done}/{self._total}", self._time(share), *row]))
        size = max(0, min(BAR, width - len(self._label) - len(text) - 2))
        bar = "#" * int(size * share) + "." * (size - int(size * share))
        return " ".join(filter(None, [self._label, bar, text]))[:width]

    def _time(self, share: float) -> str:
        elapsed = time.monotonic() - self._start
        if self._ended or share == 1:
            return f"in {_clock(elapsed)}"
        return f"{_clock(elapsed / share - elapsed)} left" if share else ""

    def _draw(self) -> None:
        self._last_drawn = time.monotonic()
        line = self.line(shutil.get_terminal_size().columns - 1)  # a line that wraps cannot be redrawn
        self._stream.write(f"\r{line:{self._width}}")  # spaces over what is left of the last one
        self._stream.flush()
        self._width = len(line)


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is an open terminal; it is ``None`` in programs without a console, such as services."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _format(value: Value) -> str:
    found = value() if callable(value) else value
    return found if isinstance(found, str) else f"{found:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
