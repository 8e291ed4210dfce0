"""Runs the suite: on each server, in three parts; on the first one all of it, with coverage.

`python -m tests [pytest's arguments]`; arguments choose tests, and then coverage is not judged.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import installations

ROOT = Path(__file__).parent.parent
VERSIONS = (18, 15)
NO_TEST_RAN = 5
ALONE = "alone"
PARTS: Mapping[str, Sequence[str]] = {
    # Most of them wait for something most of the time.
    "beside each other": ("-m", "not acceptance", "-n", str(2 * (os.cpu_count() or 1))),
    # Real worker processes: few at once, for what they prove has limits of time.
    "with workers": ("-m", "acceptance and not measured", "-n", str(1 + (os.cpu_count() or 1))),
    ALONE: ("-m", "measured"),
}


def main(arguments: Sequence[str]) -> int:
    """Run everything and return the exit code."""
    shutil.rmtree(ROOT / "build/coverage", ignore_errors=True)
    codes = [
        _run(part, options, environment, arguments, measured=number == 0)
        for number, environment in enumerate(_servers())
        for part, options in PARTS.items()
    ]
    if all(code == NO_TEST_RAN for code in codes):
        return NO_TEST_RAN
    failed = any(code not in (0, NO_TEST_RAN) for code in codes)
    if arguments:
        return int(failed)
    return int(_coverage() != 0 or failed)


def _servers() -> list[dict[str, str]]:
    if "FANOUT_TEST_DSN" in os.environ:
        return [{}]
    found = [version for version in VERSIONS if installations.find(version)]
    for version in VERSIONS:
        if version not in found:
            print(
                f"NOT TESTED on PostgreSQL {version}: {installations.remedy(version)}", flush=True
            )
    if not found:
        raise SystemExit("no PostgreSQL to test on")
    return [{"FANOUT_TEST_PG": str(version)} for version in found]


def _run(
    part: str,
    options: Sequence[str],
    environment: Mapping[str, str],
    arguments: Sequence[str],
    *,
    measured: bool,
) -> int:
    where = environment.get("FANOUT_TEST_PG")
    print(
        f"\nTests {part}, on " + (f"PostgreSQL {where}" if where else "FANOUT_TEST_DSN"), flush=True
    )
    # What measures is not slowed down by it.
    coverage = ["-m", "coverage", "run"] if measured and part != ALONE else []
    return _call([*coverage, "-m", "pytest", "-q", *options, *arguments], environment)


def _coverage() -> int:
    print("\nCoverage", flush=True)
    return _call(["-m", "coverage", "combine", "--quiet"]) or _call(["-m", "coverage", "report"])


def _call(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    env = {**os.environ, **(environment or {})}
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C has reached pytest too: let it clean up, and stop there
        raise SystemExit(130) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
