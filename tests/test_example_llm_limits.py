"""The example of a limited model: the demo as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.mark.pg18_only
@pytest.mark.acceptance
def test_the_model_is_never_asked_too_much() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "examples.llm_limits.demo"),
            *("--items=20", "--processes=2", "--seconds=0.05"),
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    most = re.search(r"asked by (\d+) at most", done.stdout)
    assert most is not None and 1 < int(most[1]) <= 4
    assert "It answered 40 times and refused 0 times" in done.stdout
