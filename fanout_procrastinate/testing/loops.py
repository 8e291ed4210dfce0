"""Sync functions that run a loop of their own cannot do so inside one."""

import asyncio


def refuse(name: str) -> None:
    """Refuse a sync call inside a running event loop.

    Raises:
        RuntimeError: there is one; the message names the async twin.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"{name} called inside a running event loop; await {name}_async instead")
