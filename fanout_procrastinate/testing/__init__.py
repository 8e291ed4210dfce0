"""For your tests: work until nothing is due, or run a fan-out without any database."""

from fanout_procrastinate.testing.draining import drain, drain_async
from fanout_procrastinate.testing.inline import InlineProgress, run_inline, run_inline_async

__all__ = ["InlineProgress", "drain", "drain_async", "run_inline", "run_inline_async"]
