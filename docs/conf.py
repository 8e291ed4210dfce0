"""Sphinx's settings: Markdown by MyST, the furo theme, API pages from the docstrings."""

from importlib.metadata import version as installed_version

project = "fanout_procrastinate"
author = "The fanout_procrastinate developers"
copyright = f"2026, {author}"
version = release = installed_version("fanout_procrastinate")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autoclass_content = "both"

html_theme = "furo"
html_title = "fanout_procrastinate"
