"""The entry point of the command `proxmo`, which needs the extra `reproduce`; the library itself does not."""

from __future__ import annotations

import sys
from importlib.util import find_spec

REQUIRED = ("jinja2", "matplotlib", "PIL", "rich", "sklearn", "typer")  # what the extra `reproduce` installs


def main() -> None:
    """Run the command, or exit with a hint if a package that it needs is not installed."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        sys.exit(f"proxmo: this command needs {', '.join(missing)}: pip install 'proxmo[reproduce]'")
    from proxmo.experiments.commands import app

    app()
