"""The claims, figures and tables of the report, and the page in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxmo.experiments import comparison_report, synthetic, synthetic_report
from proxmo.experiments.comparison import Comparison, TrainingExperiment
from proxmo.experiments.comparison_report import roughness
from proxmo.experiments.figures import to_svg
from proxmo.experiments.proxy import Proxy
from proxmo.experiments.regularized import Regularized
from proxmo.experiments.report import render
from proxmo.experiments.synthetic_report import draw_all_methods, draw_paper_methods, fastest
from proxmo.experiments.training import Epoch, Record, Setting

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def quadratic(problem: synthetic.Quadratic) -> synthetic.Results:
    return synthetic.run(seeds=3, iterations=300, problem=problem).joined(
        synthetic.run_auto(seeds=1, iterations=300, problem=problem)
    )


@pytest.fixture(scope="module")
def results() -> synthetic.Results:
    return quadratic(synthetic.PAPER)


def record(momentum: float, lr: float, loss: float, accuracy: float, batch: int = 256, seed: int = 0) -> Record:
    """Return a run that ends with the given numbers."""
    epochs = [Epoch(loss * (3 - k), 1.0, accuracy - 0.1 * (2 - k), 2.0, 0.25 * k, 0.1 * k) for k in range(3)]
    return Record(Setting(lr, momentum, batch, epochs=3, width=8, seed=seed), epochs, diverged=False, seconds=1.0)


def comparison(experiment: TrainingExperiment | None = None) -> Comparison:
    """Return runs where the best lr is 0.1 for momentum (0.01 with batch 128) and 0.3 for vanilla."""
    return Comparison(
        experiment or Regularized(),
        [
            record(0.9, 0.1, 0.5, 0.8),
            record(0.9, 0.3, 0.9, 0.7),
            record(0.0, 0.1, 0.8, 0.6),
            record(0.0, 0.3, 0.6, 0.9),
            record(0.9, 0.1, 0.5, 0.8, batch=128),
            record(0.9, 0.01, 0.4, 0.8, batch=128),
            record(0.0, 0.1, 0.8, 0.6, batch=128),
            record(0.9, 0.1, 0.7, 0.9, seed=1),
            record(0.0, 0.3, 0.6, 0.9, seed=1),
        ],
    )


def test_comparison_finds_tuned_settings_and_summarises_seeds() -> None:
    found = comparison()
    assert found.tuned(256, vanilla=False) == Setting(0.1, 0.9, 256, 3, 8, 0)
    assert found.tuned(256, vanilla=True) == Setting(0.3, 0.0, 256, 3, 8, 0)
    assert found.tuned(128, vanilla=False).lr == 0.01
    assert found.summary(found.tuned(256, vanilla=False), "train_loss") == pytest.approx((0.6, 0.02**0.5))
    assert found.summary(found.tuned(256, vanilla=False), "objective") == pytest.approx((2.6, 0.02**0.5))
    assert found.summary(found.tuned(128, vanilla=False), "test_accuracy") == (0.8, None)
    assert found.batches == [256, 128]


def test_claims_of_a_training_experiment() -> None:
    claims = {claim.statement: claim for claim in comparison_report.claims(comparison())}
    at_paper = claims["training loss: momentum is ahead (lr = 0.1, momentum 0.9)"]
    assert at_paper.agrees
    assert at_paper.measured == "0.600 ± 0.141 against 0.800"
    assert not claims["training loss: momentum is ahead (each tuned)"].agrees  # 0.6 is not less than 0.6
    accuracy = claims["test accuracy: momentum is ahead (each tuned)"]
    assert accuracy.measured == "85.0% ± 7.1% against 90.0% ± 0.0%"
    assert not accuracy.agrees
    other = claims["training loss: momentum is ahead (lr = 0.1, momentum 0.9, batch 128)"]
    assert (other.measured, other.agrees) == ("0.500 against 0.800", True)
    assert claims["batch 256: best for momentum by training loss, one seed"].agrees
    assert claims["batch 128: best for momentum by training loss, one seed"].measured == "lr 0.01, momentum 0.9"
    smaller = claims["training loss: batch 128 in place of 256 costs momentum no more than vanilla"]
    assert (smaller.measured, smaller.agrees) == ("momentum 0.600 → 0.400, vanilla 0.600 → 0.800", True)
    assert len(comparison_report.claims(comparison(Proxy()))) == 3  # runs too short for a claim about smoothness


def test_table_explains_the_objective_and_the_batch_sizes() -> None:
    note = comparison_report.section(comparison(), "digits", {}, 0).tables[0].note
    assert "F = f + ψ, the training loss plus the penalty" in note
    assert "ψ = 2.000 ± 0.000 with momentum, ψ = 2.000 ± 0.000 without, F = 2.600 ± 0.141 with momentum" in note
    assert "in place of" not in note
    pairs = [record(momentum, 0.1, 0.5, 0.8, batch) for batch in (16, 4) for momentum in (0.0, 0.9)]
    scaled = Comparison(Regularized(), pairs)
    assert (
        "Batches of 16, 4 take the place of the paper's 256, 64"
        in comparison_report.section(scaled, "digits", {}, 0).tables[0].note
    )
    claims = {claim.statement: claim for claim in comparison_report.claims(scaled)}
    best = claims["batch 4 (in place of 64): best for momentum by training loss, one seed"]
    assert (best.paper, best.agrees) == ("lr 0.01, momentum 0.9", False)
    annealed = replace(record(0.9, 0.1, 0.1, 0.9), setting=Setting(0.1, 0.9, 256, 3, 8, 0, annealed=True))
    found = Comparison(Regularized(), [*comparison().records, annealed])
    assert found.tuned(256, vanilla=False) == comparison().tuned(
        256, vanilla=False
    )  # a variant, not the paper's method
    rows = comparison_report.section(found, "digits", {}, 0).tables[0].rows
    assert [row[4] for row in rows if row[0] == "momentum 0.9, annealed"] == ["0.100"]
    drawn = {line.get_label(): line for line in comparison_report.draw(found).axes[0].lines}
    assert drawn["momentum 0.9, annealed, lr 0.1"].get_ydata()[-1] == pytest.approx(0.1)


def test_roughness_ignores_the_rate_of_improvement() -> None:
    def run(momentum: float, accuracies: list[float], *, diverged: bool = False) -> Record:
        epochs = [Epoch(1.0, 1.0, accuracy, 0.0, 0.0, 0.0) for accuracy in accuracies]
        return Record(Setting(0.1, momentum, 256, 8, 8, 0), [] if diverged else epochs, diverged, seconds=1.0)

    rising, oscillating = [0.1] * 4 + [0.2, 0.4, 0.6, 0.9], [0.1] * 4 + [0.5, 0.4, 0.6, 0.5]
    assert roughness(run(0.9, rising)) == pytest.approx(0)
    assert roughness(run(0.0, oscillating)) == pytest.approx(0.4 / 3)
    for diverged, measured in ((False, "0.00% against 13.33%"), (True, "diverged against 13.33%")):
        runs = [run(0.9, rising, diverged=diverged), run(0.0, oscillating)]
        claim = comparison_report.claims(Comparison(Proxy(), runs))[-1]
        assert "smoother" in claim.statement
        assert (claim.measured, claim.agrees) == (measured, not diverged)


def test_diverged_runs_rank_last_and_are_labelled() -> None:
    whole = comparison()
    broken = Record(Setting(1.0, 0.9, 256, 3, 8, 0), [], diverged=True, seconds=1.0)
    found = Comparison(Regularized(), [broken, *whole.records])
    assert found.tuned(256, vanilla=False) == whole.tuned(256, vanilla=False)
    assert found.summary(broken.setting, "train_loss") is None
    table = comparison_report.section(found, "digits", {}, 0).tables[0]
    assert next(row for row in table.rows if row[2] == "1")[4:] == ["diverged"] * 6
    hopeless = Comparison(Proxy(), [broken, record(0.0, 0.1, 0.8, 0.6)])
    assert [claim.agrees for claim in comparison_report.claims(hopeless)] == [False, False]
    assert comparison_report.claims(hopeless)[0].measured == "diverged against 0.800"
    assert len(comparison_report.draw(hopeless).axes[0].lines) == 1
    partly = Comparison(
        Proxy(), [*whole.records, replace(broken, setting=replace(whole.tuned(256, vanilla=True), seed=2))]
    )
    labels = [line.get_label() for line in comparison_report.draw(partly).axes[0].lines]
    assert labels == ["momentum 0.9, lr 0.1", "vanilla, lr 0.3 (2 of 3 seeds)"]


def test_claims_of_the_quadratic(results: synthetic.Results) -> None:
    claims = synthetic_report.claims(results)
    assert len(claims) == 3 * 7
    floors = [claim for claim in claims if "oscillates" in claim.statement]
    assert [claim.paper for claim in floors] == ["22", "672", "14,381"]
    assert all(claim.agrees for claim in floors)
    assert all(claim.measured.endswith("with M = 10,000") for claim in floors)  # where the floor is lowest
    unreached = next(c for c in claims if c.statement == "σ = 125: momentum with M = 100, γ = 0.0001 reaches 0.02")
    assert (unreached.paper, unreached.measured, unreached.agrees) == ("yes", "0% of the seeds", False)
    assert fastest(results, 125.0) == []
    nothing = [claim for claim in claims if claim.statement == "σ = 125: M that reaches it with the fewest samples"]
    assert [(claim.measured, claim.agrees) for claim in nothing] == [("none for half of the seeds", False)]


def test_claims_name_all_equally_fast_settings(results: synthetic.Results) -> None:
    cells = [
        replace(cell, median_samples=631.0 if (cell.gamma == 0.01 and cell.M in (1, 10)) else None)
        for cell in results.cells
    ]
    found = {claim.statement: claim for claim in synthetic_report.claims(replace(results, cells=cells))}
    tuned = found["σ = 5: M that reaches it with the fewest samples"]
    assert (tuned.paper, tuned.measured, tuned.agrees) == ("10", "1 or 10", True)
    assert found["σ = 5: γ that reaches it with the fewest samples"].measured == "0.01"


def test_figures_have_the_panels_and_lines_of_their_data(results: synthetic.Results) -> None:
    for figure, lines in ((draw_paper_methods(results), 4), (draw_all_methods(results), 5)):
        assert [axes.get_title().split(" (")[0] for axes in figure.axes] == ["σ = 5", "σ = 25", "σ = 125"]
        for axes in figure.axes:
            labelled = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
            assert len(labelled) == lines
    panels = comparison_report.draw(comparison()).axes
    assert [axes.get_title() for axes in panels] == [
        "training loss", "test accuracy", "F = f + ψ", "share of zero weights",
    ]  # fmt: skip
    assert list(panels[0].lines[0].get_ydata()) == pytest.approx([1.8, 1.2, 0.6])
    assert len(comparison_report.draw(comparison(Proxy())).axes) == 2


def test_figure_of_batch_sizes_shows_each_method_tuned_at_each_size() -> None:
    loss = comparison_report.draw_batches(comparison()).axes[0]
    drawn = {bars.get_label(): bars[0] for bars in loss.containers}
    assert list(drawn["momentum"].get_xdata()) == list(drawn["vanilla"].get_xdata()) == [256, 128]
    assert list(drawn["momentum"].get_ydata()) == pytest.approx([0.6, 0.4])  # two seeds, then lr 0.01
    assert list(drawn["vanilla"].get_ydata()) == pytest.approx([0.6, 0.8])
    assert [tick.get_text() for tick in loss.get_xticklabels()] == ["256", "128"]
    figure = comparison_report.draw_batches(comparison())
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3
    one_size = Comparison(Regularized(), comparison().matching(batch=256))
    assert len(comparison_report.section(one_size, "digits", {}, 0).figures) == 1
    assert len(comparison_report.section(comparison(), "digits", {}, 0).figures) == 2


def test_svg_uses_the_text_colour_of_the_page_and_unique_ids(results: synthetic.Results) -> None:
    one, other = (to_svg(draw_paper_methods(results), name) for name in ("one", "other"))
    assert one.startswith("<svg viewBox=")
    assert "currentColor" in one
    assert "#010203" not in one
    names = set(re.findall(r'id="([^"]+)"', one))
    assert names
    assert not names & set(re.findall(r'id="([^"]+)"', other))
    used = re.findall(r"(?:url\(|href=\")#([^)\"]+)", one)
    assert used
    assert set(used) <= names
    assert "gradient samples" in one  # text, not outlines


@pytest.fixture(scope="module")
def page(results: synthetic.Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sections = [
        synthetic_report.section(results, quadratic(synthetic.SHIFTED), {"seeds": ["0-1", "5"]}),
        comparison_report.section(comparison(), "digits", {"command": "proxmo reproduce regularized"}, 0),
        comparison_report.section(comparison(Proxy()), "<b>digits</b>", {"command": "proxmo reproduce proxy"}, 0),
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(sections), encoding="utf-8")
    return path


def test_page_is_self_contained(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "<script" not in text
    assert "&lt;b&gt;digits&lt;/b&gt;" in text  # text is escaped
    assert "proxmo reproduce regularized" in text
    assert "<code>0-1, 5</code>" in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_page_is_readable_in_a_browser(page: Path, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view = context.new_page()
    problems: list[str] = []
    view.on("console", lambda message: problems.append(message.text))
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
    view.goto(page.as_uri())
    assert problems == []
    figures = view.query_selector_all("figure svg")
    assert len(figures) == 7
    for figure in figures:
        assert figure.bounding_box()["height"] > 150
        # Never scaled down, so that its text stays legible: on a phone the figure scrolls.
        drawn = "s.viewBox.baseVal"
        scale = figure.evaluate(f"s => Math.min(s.clientWidth / {drawn}.width, s.clientHeight / {drawn}.height)")
        assert scale >= 0.99
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")  # the page itself does not scroll
    size = float(view.evaluate("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)"))
    assert size >= 14
    ink, background = (
        [int(part) for part in re.findall(r"\d+", view.evaluate(f"getComputedStyle(document.body).{what}"))[:3]]
        for what in ("color", "backgroundColor")
    )
    assert (sum(ink) > sum(background)) == (scheme == "dark")
    assert abs(sum(ink) - sum(background)) > 450
    context.close()
