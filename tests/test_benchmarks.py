"""The benchmarks run, count everything, and say what they compared."""

import json
import subprocess
import sys

import pytest

from tests.workers import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.pg18_only]


def test_throughput_compares_both_kinds_side_by_side() -> None:
    """A small round: the command fails where an item is not counted."""
    command = ["-m", "tests.benchmarks.throughput", "--items", "200", "--rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["settings"]["items"] == 200
    assert figures["settings"]["processes"] == 2
    assert figures["plain_jobs_per_second"] > 0
    assert figures["ratio"] == pytest.approx(
        figures["fanout_items_per_second"] / figures["plain_jobs_per_second"], rel=0.05
    )


def test_events_compares_with_and_without_side_by_side() -> None:
    """G05: a small round; who watches is told of each close, and notified rarely."""
    options = ["--items", "320", "--runs", "4", "--processes", "1", "--rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.events", *options],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["settings"]["runs"] == 4 and figures["share"] > 0
    # Five hints a second at most, the close, and the first hint at once: short runs weigh heavily.
    assert 0 < figures["notifications_per_run_and_second"] < 15
