"""Configuration of Sphinx for the documentation: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_solo import __version__ as release

project = "lightning-solo"
author = "the authors of lightning-solo"
copyright = "2026, the authors of lightning-solo. Apache-2.0"
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "tables_extension"]
exclude_patterns = ["_build", "_ext"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

default_role = "code"  # docstrings name code between single backquotes
autodoc_default_options = {"members": True, "show-inheritance": False, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = []

html_theme = "furo"
html_title = f"lightning-solo {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
