"""Sphinx's settings: Markdown by MyST, the furo theme, API pages from the docstrings."""

import argparse
import os
from importlib.metadata import version as installed_version

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fanout_procrastinate.cli import program

project = "fanout_procrastinate"
author = "The fanout_procrastinate developers"
copyright = f"2026, {author}"
version = release = installed_version("fanout_procrastinate")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"  # of single backticks in docstrings
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autoclass_content = "both"

html_theme = "furo"
html_title = "fanout_procrastinate"
html_static_path = ["_static"]
html_css_files = ["brand.css"]


class FanoutHelp(SphinxDirective):
    """Show what ``fanout COMMAND --help`` prints, or ``fanout --help``."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = _parser_of(*self.arguments).format_help()
        return [nodes.literal_block(text, text, language="text")]


def _parser_of(command: str | None = None) -> argparse.ArgumentParser:
    top = program.parser()
    if command is None:
        return top
    choices = next(one.choices for one in top._actions if isinstance(one.choices, dict))
    found: argparse.ArgumentParser = choices[command]
    return found


def setup(app: Sphinx) -> None:
    """Register the directive; the help is as wide as the page, and has no colours."""
    os.environ |= {"COLUMNS": "88", "NO_COLOR": "1"}
    app.add_directive("fanout-help", FanoutHelp)
