"""Whole runs with real worker processes that die, block, stop and race."""

import pytest

pytest.register_assert_rewrite("tests.acceptance.scene")
