"""`python -m tests.chaos --seconds 60 --seed 1`: one round, its figures and its verdict."""

import argparse
import logging
import secrets
import shutil
import sys
import time
from collections.abc import Sequence

from tests.chaos.harness import Options, Result, play
from tests.workers import ROOT

_SHOWN = 5
_CUT = 1500


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one round and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults")
    parser.add_argument("--seed", type=int, help="of the runs and the faults; else a new one")
    parser.add_argument("--quiet", action="store_true", help="do not tell each fault")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a good round too")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    folder = ROOT / "build/chaos" / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    folder.mkdir(parents=True)
    print(f"{given.seconds:g} s of faults, seed {seed}; logs in {folder}", flush=True)
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # the server goes away all the time
    options = Options(seconds=given.seconds, seed=seed, folder=folder)
    result = play(options, _silent if given.quiet else _say)
    print(report(result, options), flush=True)
    if result.findings:
        print(f"The logs are kept: {folder}", flush=True)
    elif not given.keep:
        shutil.rmtree(folder)
    return int(bool(result.findings))


def report(result: Result, options: Options) -> str:
    """Return what was done to the system, what it did, and the verdict."""
    figures = result.figures
    lines = [
        "",
        "Done to it: " + _counts(result.faults),
        "Hit nothing: " + _counts(result.missed),
        "Workers ended: " + _counts(result.ends),
        f"Runs: {figures['runs']} ({figures['generations']} closes, {figures['listings']} listings,"
        f" {figures['callbacks']} callbacks)",
        f"Items: {figures['items']} ({figures['succeeded']} succeeded, {figures['failed']} failed,"
        f" {figures['cancelled']} cancelled)",
        f"Attempts: {figures['attempts']}; rescues: {figures['rescues']}"
        f" ({figures['rescues_from_the_well']} from workers that were only cut off);"
        f" longest stall: {result.longest_stall:.1f} s;"
        f" at rest {result.rest:.1f} s after the last fault",
    ]
    for name, found in result.findings.items():
        lines.append(f"\nBROKEN, {len(found)} times: {name.replace('_', ' ')}")
        lines += [f"  {one[:_CUT]}" for one in found[:_SHOWN]]
    verdict = f"verdict: {result.lost} lost, {result.double} double, "
    if result.findings:
        verdict += f"{len(result.findings)} promises broken by {result.faults.total()} faults"
        verdict += f"; again: make chaos SECONDS={options.seconds:g} SEED={options.seed}"
    else:
        verdict += f"{result.faults.total()} faults survived"
    return "\n".join([*lines, verdict])


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing"


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    """Tell nobody."""


if __name__ == "__main__":
    sys.exit(main())
