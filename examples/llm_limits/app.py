"""Two kinds of children that share one limited model, whatever runs and wherever.

`summarise` needs the model for all of its work and declares it in `limits=`. `review` needs it for
a part of its work, and takes a permit for that part.
"""

import json
import os
import time
import urllib.error
import urllib.request

import procrastinate

from fanout_procrastinate import FanOut, ItemContext, Limit, TransientError, fanout_child

AT_ONCE = 4

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ.get("FANOUT_EXAMPLE_DSN", "")),
    import_paths=["examples.llm_limits.app"],
)
fanout = FanOut(app, lease=10.0)

llm = Limit("llm", concurrency=AT_ONCE)


def ask(text: str) -> int:
    """Ask the model. If it says that it is too much, nobody asks it for as long as it wants."""
    request = urllib.request.Request(os.environ["FANOUT_EXAMPLE_LLM"], data=text.encode())  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own service
            return int(json.load(answer)["words"])
    except urllib.error.HTTPError as exc:
        if exc.code != 429:
            raise
        seconds = float(exc.headers["Retry-After"])
        llm.pause(seconds)
        raise TransientError("the model is busy", retry_in=seconds) from exc


@fanout_child(app, queue="llm", limits=[llm])
def summarise(text: str) -> int:
    """Ask the model, and nothing else."""
    return ask(text)


@fanout_child(app, queue="llm", pass_context=True)
def review(context: ItemContext, text: str) -> int:
    """Read first, which needs no model; then ask it."""
    time.sleep(0.02)
    with context.permit(llm):
        return ask(text)


@fanout_child(app, queue="llm")
def careless(text: str) -> int:
    """Ask the model without a limit, as a comparison."""
    return ask(text)
