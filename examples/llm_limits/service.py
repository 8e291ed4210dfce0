"""A language model's service, pretended: it serves few at once and counts what it is asked."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

RETRY_AFTER_SECONDS = 1


class Service:
    """Answer at most `at_once` questions at the same time; beyond, 429 with Retry-After.

    Args:
        at_once: questions at the same time.
        seconds: that an answer takes.
    """

    def __init__(self, at_once: int, seconds: float) -> None:
        self.at_once = at_once
        self.seconds = seconds
        self.answered = 0
        self.refused = 0
        self.most = 0
        self._open = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def enter(self) -> bool:
        """Begin a question; false where too many are open."""
        with self._lock:
            if self._open >= self.at_once:
                self.refused += 1
                return False
            self._open += 1
            self.most = max(self.most, self._open)
            return True

    def leave(self) -> None:
        """End a question."""
        with self._lock:
            self._open -= 1
            self.answered += 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                if not service.enter():
                    self.send_response(429)
                    self.send_header("Retry-After", str(RETRY_AFTER_SECONDS))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                try:
                    time.sleep(service.seconds)
                    answer = json.dumps({"words": len(text.split())}).encode()
                finally:
                    service.leave()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Keep quiet."""

        return Handler
