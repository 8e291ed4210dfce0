"""A TCP proxy before a PostgreSQL server that loses, holds back and cuts what passes through it."""

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_CHUNK = 65536


class Link:
    """One client's connection to the server, through the proxy."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.latency = 0.0
        self.loses_requests = False
        self.loses_replies = False
        self.cuts_on_loss = False
        self.lost = False
        self._ends = [client]

    def join(self, server: asyncio.StreamWriter) -> None:
        """Add the server's side."""
        self._ends.append(server)

    def cut(self) -> None:
        """End both sides as a broken network does: by a reset."""
        self.open.set()
        for end in self._ends:
            _reset(end)

    async def carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        """Carry one direction until either side ends."""
        while data := await source.read(_CHUNK):
            await asyncio.sleep(self.latency)
            await self.open.wait()
            if self.loses_replies if replies else self.loses_requests:
                self.lost = True
                if self.cuts_on_loss:
                    return
                continue
            target.write(data)
            await target.drain()


class Proxy:
    """Listen on a free loopback port: `with Proxy(socket_of_the_server) as proxy`.

    It runs in a thread of its own; every method may be called from any thread. The methods that
    harm take `chosen`, which is asked of each link, and return how many links were hit.
    """

    def __init__(self, server: Path) -> None:
        self._server_path = server
        self._links: set[Link] = set()
        self._refusing = self._frozen = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._started = threading.Event()
        self._ended = asyncio.Event()
        self.port = 0

    def start(self) -> Self:
        """Listen."""
        self._thread.start()
        self._started.wait()
        return self

    def close(self) -> None:
        """Cut every link and listen no more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- harm

    def cut(self, chosen: Callable[[], bool]) -> int:
        """Cut links, whatever is on its way."""
        return self._on_links(chosen, Link.cut)

    def lose_replies(self, chosen: Callable[[], bool]) -> int:
        """Lose the next reply of each link, and cut it then: its statement was executed."""

        def arm(link: Link) -> None:
            link.loses_replies = link.cuts_on_loss = True

        return self._on_links(chosen, arm)

    def lose_requests(self, chosen: Callable[[], bool]) -> int:
        """Lose the next request of each link, and cut it then: its statement never arrives."""

        def arm(link: Link) -> None:
            link.loses_requests = link.cuts_on_loss = True

        return self._on_links(chosen, arm)

    def swallow(self, chosen: Callable[[], bool], seconds: float) -> int:
        """Swallow all replies for a time; then cut the links that have lost some."""

        async def swallow(links: Iterable[Link]) -> None:
            for link in links:
                link.loses_replies = True
            await asyncio.sleep(seconds)
            for link in links:
                link.loses_replies = False
                if link.lost:
                    link.cut()

        return self._for_a_time(chosen, swallow)

    def freeze(self, chosen: Callable[[], bool], seconds: float) -> int:
        """Hold back everything for a time; then let it go on."""

        async def freeze(links: Iterable[Link]) -> None:
            for link in links:
                link.open.clear()
            await asyncio.sleep(seconds)
            for link in links:
                link.open.set()

        return self._for_a_time(chosen, freeze)

    def freeze_all(self) -> None:
        """Hold back everything, of links to come too, until `thaw`; the sockets stay open."""
        self._set_frozen(True)

    def thaw(self) -> None:
        """Let what `freeze_all` holds back go on."""
        self._set_frozen(False)

    def delay(self, chosen: Callable[[], bool], seconds: float, latency: float) -> int:
        """Hold back each piece by `latency` seconds for a time."""

        async def delay(links: Iterable[Link]) -> None:
            for link in links:
                link.latency = latency
            await asyncio.sleep(seconds)
            for link in links:
                link.latency = 0.0

        return self._for_a_time(chosen, delay)

    def refuse(self, seconds: float) -> int:
        """Cut every link, and refuse new ones for a time."""

        async def refuse(links: Iterable[Link]) -> None:
            self._refusing = True
            for link in links:
                link.cut()
            await asyncio.sleep(seconds)
            self._refusing = False

        return self._for_a_time(lambda: True, refuse)

    def heal(self) -> None:
        """Take back what still waits for its moment."""

        def heal(link: Link) -> None:
            link.loses_requests = link.loses_replies = link.cuts_on_loss = False

        self._on_links(lambda: True, heal)

    # -- the thread's side

    def _on_links(self, chosen: Callable[[], bool], act: Callable[[Link], None]) -> int:
        async def on_links(links: Iterable[Link]) -> None:
            for link in links:
                act(link)

        return self._for_a_time(chosen, on_links)

    def _set_frozen(self, frozen: bool) -> None:
        async def set_all(links: Iterable[Link]) -> None:
            self._frozen = frozen
            for link in links:
                if frozen:
                    link.open.clear()
                else:
                    link.open.set()

        self._for_a_time(lambda: True, set_all)

    def _for_a_time(
        self, chosen: Callable[[], bool], act: Callable[[list[Link]], Coroutine[Any, Any, None]]
    ) -> int:
        async def for_a_time() -> int:
            links = [link for link in self._links if chosen()]
            await act(links)
            return len(links)

        return asyncio.run_coroutine_threadsafe(for_a_time(), self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.close()

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._ended.wait()
        server.close()
        for link in self._links:
            link.cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=5.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(writer)
        if self._refusing:
            link.cut()
            return
        try:
            behind = await asyncio.open_unix_connection(self._server_path)
        except OSError:  # the server is down
            link.cut()
            return
        link.join(behind[1])
        if self._frozen:
            link.open.clear()
        self._links.add(link)
        try:
            await _until_first(
                link.carry(reader, behind[1], replies=False),
                link.carry(behind[0], writer, replies=True),
            )
        finally:
            self._links.discard(link)
            link.cut()


async def _until_first(*pumps: Awaitable[None]) -> None:
    """Run all until one ends, whatever its end; end the others then."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(end: asyncio.StreamWriter) -> None:
    raw = end.get_extra_info("socket")
    if raw is not None and raw.family == socket.AF_INET and not end.transport.is_closing():
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()
