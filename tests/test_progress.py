"""The progress line: what it says, and that it is quiet where there is no terminal."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest

from proxmo import progress
from proxmo.progress import Progress


class Terminal(io.StringIO):
    """Text that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=screen))  # pytest resets sys.stderr itself
    monkeypatch.setenv("COLUMNS", "80")
    return screen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_log_gets_nothing_and_values_are_not_computed(capfd: pytest.CaptureFixture[str]) -> None:
    asked = []
    with Progress(10, "fit") as bar:
        for _ in bar.over(range(10)):
            bar.show(zeros=lambda: asked.append(1) or 0.0)
    assert capfd.readouterr() == ("", "")
    assert not asked


def test_line_has_bar_count_time_left_and_values(terminal: Terminal, clock: list[float]) -> None:
    bar = Progress(4, "fit")
    assert bar.line() == "fit ........................ 0/4"
    bar.show(loss=0.123456, zeros="84%")
    clock[0] += 3661
    bar.advance()
    assert bar.line() == "fit ######.................. 1/4 3:03:03 left  loss 0.123  zeros 84%"
    clock[0] += 5
    bar.advance(3)
    assert bar.line() == "fit ######################## 4/4 in 1:01:06  loss 0.123  zeros 84%"


def test_redraws_in_place_at_most_four_times_a_second(terminal: Terminal, clock: list[float]) -> None:
    with Progress(100) as bar:
        for _ in bar.over(range(100)):
            clock[0] += 0.01
    drawn = terminal.getvalue()
    assert drawn.count("\r") in (5, 6)  # at the start, in between, at the end
    assert drawn.endswith("100/100 in 0:01\n")
    assert drawn.count("\n") == 1


def test_values_are_computed_only_when_drawn(terminal: Terminal, clock: list[float]) -> None:
    asked = []
    with Progress(100) as bar:
        bar.show(zeros=lambda: asked.append(1) or 0.5)
        for _ in bar.over(range(100)):
            clock[0] += 0.01
    assert len(asked) in (4, 5)
    assert "zeros 0.5" in terminal.getvalue()


def test_shorter_line_covers_a_longer_one(terminal: Terminal, clock: list[float]) -> None:
    bar = Progress(2)
    bar.show(state="long text")
    with bar:
        bar.show(state="x")
    _, first, second = terminal.getvalue().split("\r")
    assert len(second.rstrip("\n")) == len(first)


def test_line_fits_the_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with Progress(2, "fit"):
        pass
    assert [len(line) for line in terminal.getvalue().split("\r")] == [0, 19, 20]  # with the line break


def test_bar_makes_room_for_the_values() -> None:
    bar = Progress(2, "fit")
    bar.show(loss=0.5)
    bar.advance()
    full = "fit ############............ 1/2 0:00 left  loss 0.5"
    assert bar.line() == full
    assert bar.line(len(full) - 20) == "fit ##.. 1/2 0:00 left  loss 0.5"
    assert bar.line(20) == "fit 1/2 0:00 left  l"


def test_error_ends_the_line_where_the_work_stopped(terminal: Terminal) -> None:
    def work() -> None:
        with Progress(3) as bar:
            for item in bar.over(range(3)):
                if item == 2:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert terminal.getvalue().endswith("2/3 in 0:00\n")


def test_hidden_on_a_terminal_too(terminal: Terminal) -> None:
    with Progress(3, shown=False) as bar:
        bar.advance()
    assert terminal.getvalue() == ""


def test_no_steps_are_all_done(terminal: Terminal) -> None:
    with Progress(0):
        pass
    assert "#" * progress.BAR + " 0/0" in terminal.getvalue()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_draws_on_a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    with open(writer, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with Progress(1, "fit") as bar:
            bar.advance()
        drawn = b""
        while b"\n" not in drawn:
            drawn += os.read(reader, 1000)
        assert b"1/1 in 0:00" in drawn
    os.close(reader)


def test_reach_sets_the_count_but_never_back(terminal: Terminal, clock: list[float]) -> None:
    bar = Progress(10, "fit")
    for count in (4, 2):
        bar.reach(count)
        assert "4/10" in bar.line()


def test_negative_total_is_refused() -> None:
    with pytest.raises(ValueError, match="total must be an integer >= 0, got -1"):
        Progress(-1)


def test_missing_and_closed_streams_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, object()):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(2) as progress:
            progress.advance()
        assert progress.line().startswith("#")
