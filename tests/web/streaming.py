"""Clients of event streams: inside the test's process, and over a real connection."""

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import ASGIApp, Message

from tests.waiting import wait_until_async


@dataclasses.dataclass(frozen=True)
class Sent:
    """One event of a stream as a browser would understand it; `kind` is "" for a comment."""

    kind: str
    id: str | None
    data: Any
    text: str


def parsed(text: str) -> list[Sent]:
    """Return the complete events of a stream."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n")[:-1]:
        fields: dict[str, list[str]] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        data = "\n".join(fields.get("data", []))
        found.append(
            Sent(
                kind=fields.get("event", [""])[0],
                id=fields["id"][0] if "id" in fields else None,
                data=json.loads(data) if data else None,
                text=block,
            )
        )
    return found


class Stream:
    """A request to an application in this process, its response growing: `async with Stream()`.

    Args:
        app: the application.
        path: what is asked for.
        method: of the request.
        headers: of the request.
        stalls_after: the client stops taking anything after so many messages.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        stalls_after: int | None = None,
    ) -> None:
        given = {"host": "localhost", "accept-encoding": "gzip", **(headers or {})}
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        self._app = app
        self._left = asyncio.Event()
        self._stalls_after = stalls_after
        self._messages = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False

    async def __aenter__(self) -> "Stream":
        self.task = asyncio.create_task(
            self._app(self._scope, self._receive, self._send), name="test-stream"
        )
        await wait_until_async(lambda: self.status or self.task.done())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left.set()
        async with asyncio.timeout(10):
            await self.task

    @property
    def sent(self) -> list[Sent]:
        return parsed(self.body.decode())

    @property
    def kinds(self) -> list[str]:
        return [one.kind for one in self.sent]

    async def until(self, kind: str, timeout: float = 10.0) -> Sent:
        """Wait for an event of a kind, and return the last of them."""
        await wait_until_async(lambda: kind in self.kinds, timeout, f"{kind} comes")
        return [one for one in self.sent if one.kind == kind][-1]

    async def ended(self, timeout: float = 10.0) -> None:
        """Wait until the server has ended the response."""
        await wait_until_async(self.task.done, timeout, "the stream ends")

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._messages += 1
        if self._stalls_after is not None and self._messages > self._stalls_after:
            await asyncio.Event().wait()
        if message["type"] == "http.response.start":
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
            self.complete = not message.get("more_body", False)


async def no_watcher() -> None:
    """End the task that watches for the end of the server: on each loop one stays for good."""
    for task in asyncio.all_tasks():
        if getattr(task.get_coro(), "__name__", "") == "_shutdown_watcher":
            task.cancel()
            await asyncio.wait({task})


class Connection:
    """A stream over a real connection, read as far as it is asked to."""

    def __init__(self, port: int, path: str) -> None:
        self._port = port
        self._path = path
        self._raw = b""

    async def open(self, receive_buffer: int | None = None) -> "Connection":
        made = socket.socket()
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=made, limit=2**14)
        request = f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        self._writer.write(request.encode())
        return self

    async def snapshot(self) -> None:
        """Read until the snapshot has come."""
        async for _ in self.news():
            if b"event: snapshot" in self._raw:
                return
        raise AssertionError(f"no snapshot: {self._raw!r}")

    async def news(self) -> AsyncIterator[None]:
        """Read to the end; each time something has come, see what is `sent`."""
        while data := await self._reader.read(2**14):
            self._raw += data
            yield
            if self._raw.endswith(b"\r\n0\r\n\r\n"):
                return

    async def to_the_end(self) -> list[Sent]:
        async for _ in self.news():
            pass
        return self.sent()

    def sent(self) -> list[Sent]:
        """Return the events that have come so far."""
        _, _, rest = self._raw.partition(b"\r\n\r\n")
        body = b""
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body, rest = body + rest[:length], rest[length + 2 :]
        return parsed(body.decode(errors="replace"))

    def vanish(self) -> None:
        """Be gone, without a word of HTTP."""
        self._writer.transport.abort()
