"""The build fails if a public name is missing from the API pages."""

import importlib
import inspect

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

MODULES = ["proxmo", "proxmo.criteria", "proxmo.plot", "proxmo.progress", "proxmo.sklearn", "proxmo.theory"]


def public_names(module_name: str) -> set[str]:
    """The full names of what a module exports: `__all__`, or the classes and functions without an underscore."""
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == module_name
    ]
    return {f"{module_name}.{name}" for name in names if not inspect.ismodule(getattr(module, name))}


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    documented = set(env.domains.python_domain.objects)
    missing = set().union(*map(public_names, MODULES)) - documented
    if missing:
        raise ExtensionError(f"docs/api lacks these public names: {', '.join(sorted(missing))}")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
