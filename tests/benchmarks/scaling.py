"""Whether a large run is as fast as a small one: fan-outs of two sizes, in turn, on one server.

    python -m tests.benchmarks.scaling --small 10000 --large 100000

The clock runs from the trigger to the close, as in `throughput`. The last line is the median of the
pairs' ratios of items per second, large to small.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

from fanout_procrastinate import FanOut
from tests.benchmarks import throughput


async def measure(dsn: str, small: int, large: int, rounds: int) -> list[tuple[float, float]]:
    """Return pairs of items per second: small, large."""
    from tests.benchmarks import throughput_app  # noqa: PLC0415 - reads libpq's environment

    async def rate(items: int) -> float:
        settings = throughput.Settings(items, 0, 0, 0)
        return items / await throughput.Bench(dsn, settings).fanout()

    pairs = []
    async with throughput_app.app.open_async():
        await rate(small)  # a warm-up, not counted
        for number in range(rounds):
            if number % 2:
                second = await rate(large)
                first = await rate(small)
            else:
                first = await rate(small)
                second = await rate(large)
            pairs.append((first, second))
            print(
                f"  pair {number + 1}: {first:.0f}/s, {second:.0f}/s", file=sys.stderr, flush=True
            )
        await FanOut.of(throughput_app.app).close_async()
    return pairs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with throughput.served() as dsn:
        print(throughput.prepare(dsn))
        with throughput.working(dsn, given.processes, given.concurrency):
            pairs = asyncio.run(measure(dsn, given.small, given.large, given.rounds))
    print(f"{given.small} items: {statistics.median(pair[0] for pair in pairs):.0f} per second")
    print(f"{given.large} items: {statistics.median(pair[1] for pair in pairs):.0f} per second")
    print(f"ratio: {statistics.median(b / a for a, b in pairs):.2f}")


if __name__ == "__main__":
    main()
