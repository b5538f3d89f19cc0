"""A real HTTP server that answers chat completions as a script says: one step a request, the last one for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One step of the script. ``hang``: nothing comes until the server closes."""

    text: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    """In place of a completion with ``text``."""
    hang: bool = False

    def content(self) -> bytes:
        message = {"role": "assistant", "content": self.text}
        return (self.body if self.body is not None else json.dumps({"choices": [{"message": message}]})).encode()


class ChatServer:
    """``requests`` are the bodies that came, ``keys`` their Authorization headers."""

    def __init__(self, script: Sequence[Answer], models: list[str] | None, on_chat: Callable[[], None]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._script = list(script)
        self._models = models
        self._on_chat = on_chat
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def next_answer(self, request: dict[str, Any], key: str | None) -> Answer:
        self._on_chat()
        with self._lock:
            self.requests.append(request)
            self.keys.append(key)
            return self._script.pop(0) if len(self._script) > 1 else self._script[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/v1/models" or server._models is None:
                    self._send(Answer(status=404, body="no such call"))
                else:
                    self._send(Answer(body=json.dumps({"data": [{"id": name} for name in server._models]})))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/chat/completions":
                    self._send(Answer(status=404, body="no such call"))
                else:
                    self._send(server.next_answer(body, self.headers["Authorization"]))

            def _send(self, answer: Answer) -> None:
                if answer.hang:
                    server._closing.wait()
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.content())))
                self.end_headers()
                self.wfile.write(answer.content())

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        return Handler


@contextmanager
def chat_server(
    *script: Answer, models: list[str] | None = None, on_chat: Callable[[], None] = lambda: None
) -> Iterator[ChatServer]:
    server = ChatServer(script, models, on_chat)
    try:
        yield server
    finally:
        server.close()
