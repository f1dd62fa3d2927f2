"""The whole package: dependencies, documentation of public names, code in README and docs, the changelog."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import proxmo
from proxmo.cli import REQUIRED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLIC = sorted(set(proxmo.__all__) - {"criteria", "theory"})


def _metadata() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # in the standard library since Python 3.11
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_library_depends_on_torch_and_numpy_only() -> None:
    assert _names(_metadata()["dependencies"]) == {"torch", "numpy"}


def test_command_requires_every_package_of_its_extra() -> None:
    distributions = {"PIL": "pillow", "sklearn": "scikit-learn"}
    extra = _metadata()["optional-dependencies"]["reproduce"]
    assert _names(extra) == {distributions.get(name, name) for name in REQUIRED}
    assert _metadata()["scripts"] == {"proxmo": "proxmo.cli:main"}


def test_import_is_light() -> None:
    """It imports neither the packages of the command nor torch's compiler, which takes as long as all of torch."""
    program = f"import sys, proxmo; print(sorted({{*{REQUIRED}, 'torch._dynamo'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_readme_has_the_commands_to_reproduce_and_to_test() -> None:
    assert "    pip install -c constraints.txt '.[reproduce]' && proxmo reproduce\n" in README
    assert "    pip install -c constraints.txt -e '.[test]' && pytest\n" in README


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    documentation = inspect.getdoc(getattr(proxmo, name)) or ""
    assert documentation.splitlines()[0].endswith((".", ":"))
    assert f"`{name}`" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    thing = getattr(proxmo, name)
    if (
        inspect.isclass(thing)
        and not inspect.isabstract(thing)
        and thing not in (proxmo.Sparsity, proxmo.Certificate, proxmo.InnerReport)
    ):
        assert ">>>" in documentation


def test_all_lists_what_the_package_exports() -> None:
    exported = {name for name, thing in vars(proxmo).items() if inspect.isclass(thing) or inspect.isfunction(thing)}
    assert exported - {"version"} == set(PUBLIC)


def _signature(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    shown = f"{default:g}" if isinstance(default, float) else f'"{default}"' if isinstance(default, str) else default
    return f"{parameter.name}={shown}"


def test_guide_lists_every_penalty_with_its_arguments_and_shows_it() -> None:
    guide = (DOCS / "penalties.md").read_text(encoding="utf-8")
    for name in PUBLIC:
        thing = getattr(proxmo, name)
        if inspect.isclass(thing) and issubclass(thing, proxmo.Penalty) and not inspect.isabstract(thing):
            arguments = ", ".join(_signature(p) for p in inspect.signature(thing).parameters.values())
            assert f"| `{name}({arguments})` |" in guide
            assert f"(pictures/{name}.png)" in guide


def test_code_in_readme_and_docs_prints_the_output_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages = README + "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", pages, flags=re.DOTALL)
    assert len(blocks) == pages.count("```python")
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {})
        assert printed.getvalue() == expected


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_api_pages_have_every_public_name() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    for name in [*PUBLIC, *proxmo.theory.__all__]:
        assert re.search(rf"^\.\. (?:auto|py:)\w+:: {name}$", pages, flags=re.MULTILINE), name


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    """On a forge; the build of the site checks its own links."""
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    for page in pages:
        if {"_build", "gallery"} & set(page.relative_to(ROOT).parts):
            continue
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page if not path else (page.parent / path).resolve()
            if link.startswith(("http://", "https://")):
                continue
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in _anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize(
    ("momentum", "sentence", "inputs"),
    [("0", "uses 19 of the 20", 19), ("0.99", "With `momentum=0.99` it uses 11", 11)],
)
def test_readme_figures_for_other_momenta_are_right(momentum: str, sentence: str, inputs: int) -> None:
    code = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code is not None
    assert sentence in README.replace("\n", " ")
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code[1].replace("momentum=0.95", f"momentum={momentum}"), names)
    used = names["model"][0].weight.abs().sum(0).count_nonzero()  # type: ignore[index]
    assert used == inputs
