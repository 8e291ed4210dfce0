"""The command line: ``fanout``, or ``python -m fanout_procrastinate``."""

from fanout_procrastinate.cli.program import main

__all__ = ["main"]
