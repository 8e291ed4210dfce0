"""Whole runs with real worker processes that die, block, stop and race."""
