"""The report: one self-contained page with a section for each experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, what was measured, and whether the two agree."""

    statement: str
    paper: str
    measured: str
    agrees: bool


@dataclass(frozen=True)
class Picture:
    """A figure and its caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class NumberTable:
    """A table of text cells; the first column is left-aligned, the others hold numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """The section of one experiment."""

    name: str
    title: str
    text: str
    figures: list[Picture]
    claims: list[Claim]
    tables: list[NumberTable]
    settings: dict[str, Any]
    """What the experiment was run with."""


def render(sections: list[Section]) -> str:
    """Return the page as HTML."""
    claims = [claim for section in sections for claim in section.claims]
    agreeing = sum(claim.agrees for claim in claims)
    headline = (
        f"{agreeing} of {len(claims)} statements of the paper agree with what was measured here; the tables show which "
        "do not."
    )
    loader = jinja2.PackageLoader("proxmo.experiments")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("report.html").render(headline=headline, sections=sections)
