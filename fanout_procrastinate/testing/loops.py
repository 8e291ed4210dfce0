"""Sync functions that run a loop of their own cannot do so inside one."""

from fanout_procrastinate import host


def refuse(name: str) -> None:
    """Refuse a sync call inside a running event loop.

    Raises:
        RuntimeError: there is one; the message names the async twin.
    """
    if host.in_a_loop():
        raise RuntimeError(f"{name} called inside a running event loop; await {name}_async instead")
