"""A server that speaks OpenEnv's protocol, with what its answers look like on the wire; it needs `websockets` only.

`make soak` runs real servers (tests/agentic/test_real_services.py). The game: say the digit that was shown, twice.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from http import HTTPStatus

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

TEXT = {"message": {"type": "string", "title": "Message"}}
MOVE = {"row": {"type": "integer"}, "column": {"type": "integer"}}
END = {"done": {"$ref": "#/$defs/Sure"}, **TEXT}
ACTIONS = {"text": TEXT, "move": MOVE, "end": END}
DEFINITIONS = {"Sure": {"enum": ["yes", "no"]}}


class Server:
    """``actions``: ``text``, ``move`` or ``end``. ``capacity``: sessions at once."""

    def __init__(self, port: int, actions: str = "text", capacity: int = 64, reuses: bool = True) -> None:
        self.fields = ACTIONS[actions]
        self.capacity = capacity
        self.sessions = 0
        self.resets: list[dict] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        listening = socket.socket()
        if reuses:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(100)
        self.socket = serve(self.session, sock=listening, process_request=self.page)

    @property
    def url(self) -> str:
        host, port = self.socket.socket.getsockname()
        return f"http://{host}:{port}"

    def stop(self) -> None:
        self.over.set()
        self.socket.shutdown()

    def page(self, connection: ServerConnection, request):
        if request.path == "/health":
            return connection.respond(HTTPStatus.OK, "{}")
        if request.path == "/schema":
            properties = {"metadata": {"type": "object"}, **self.fields}
            schema = {"properties": properties} | ({"$defs": DEFINITIONS} if self.fields is END else {})
            return connection.respond(HTTPStatus.OK, json.dumps({"action": schema}))
        return None if request.path == "/ws" else connection.respond(HTTPStatus.NOT_FOUND, "")

    def session(self, connection: ServerConnection) -> None:
        with self.lock:
            self.sessions += 1
            fits = self.sessions <= self.capacity
        try:
            if fits:
                self.play(connection)
            else:
                send(connection, "error", message="no room", code="CAPACITY_REACHED")
        except ConnectionClosed:
            pass
        finally:
            with self.lock:
                self.sessions -= 1

    def play(self, connection: ServerConnection) -> None:
        digit, steps = "", 0
        while True:
            asked = json.loads(connection.recv())
            data = asked["data"]
            if "--silent" in sys.argv:
                self.over.wait()
            if asked["type"] == "reset":
                self.resets.append(data)
                digit, steps = str(data.get("seed", 0) // 2 % 3), 0
                seen(connection, text=digit)
                continue
            misfit = [key for key in data if key not in self.fields] + [key for key in self.fields if key not in data]
            if misfit:
                errors = [{"loc": [key], "msg": "does not fit", "type": "x"} for key in misfit]
                send(connection, "error", message="Invalid message", code="VALIDATION_ERROR", errors=errors)
                continue
            said = data.get("message")
            if said == "boom":
                send(connection, "error", message="it went boom", code="EXECUTION_ERROR")
                continue
            if said == "die":
                os._exit(1)
            if said == "hang":
                self.over.wait()
            if said == "leave":
                return
            steps += 1
            seen(connection, reward=float(said == digit), done=steps == 2, text=digit, more=None)


def seen(connection: ServerConnection, reward=None, done=False, **fields) -> None:
    send(connection, "observation", observation={"metadata": {}, **fields}, reward=reward, done=done)


def send(connection: ServerConnection, kind: str, **data) -> None:
    connection.send(json.dumps({"type": kind, "data": data}))


if __name__ == "__main__":
    print("I serve", flush=True)
    if "--broken" in sys.argv:
        sys.exit("this server cannot start")
    Server(int(sys.argv[1]), reuses="--alone" not in sys.argv).socket.serve_forever()
