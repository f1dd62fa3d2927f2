"""The documentation site: `sphinx-build -W docs docs/_build`. It needs the extra `docs`, and no network."""

import sys
from pathlib import Path

import proxmo

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_extensions")]

project = "proxmo"
author = "the proxmo authors"
copyright = f"2026, {author}"
release = version = proxmo.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "gallery_links",
    "mathml",
    "public_names",
    "tables",
]
exclude_patterns = ["_build", "gallery/*.ipynb", "gallery/*.py", "gallery/*.md5"]
suppress_warnings = ["config.cache"]  # the gallery's sorting key is a class

# Pages
myst_enable_extensions = ["dollarmath", "substitution"]
myst_heading_anchors = 3
default_role = "py:obj"  # docstrings put names in single backticks

# API
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
napoleon_use_rtype = False

# Gallery: scripts run when the site is built, unless their output is there already and they have not changed
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "parallel": 2,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "min_reported_time": 1000,
    "remove_config_comments": True,
    "show_signature": False,
}

# Looks
html_theme = "furo"
html_title = f"proxmo {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
