"""Environments in an OpenEnv server, which runs at an address or is started as a program.

The server's protocol is a WebSocket at `/ws`: `{"type": "reset" | "step", "data": ...}` is answered with an observation
or an error. Each session is a connection. The policy's text becomes the fields of the server's action, and the
observation's fields become text, according to the server's schema unless the options say otherwise.
"""

from __future__ import annotations

import errno
import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPException
from subprocess import PIPE, STDOUT, TimeoutExpired
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from roll.agentic.base import ActionFormat, BadOption, ResetAnswer, StepAnswer, TextGame, Unavailable, answer_in
from roll.agentic.library.programs import LastWords, Shared, guarded

PORT = "{port}"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_POLL_SECONDS = 0.05
_MOST_PORTS = 5
_LARGEST_MESSAGE = 64 * 2**20
_CLOSE_SECONDS = 1.0
_METADATA = "metadata"
"""Field that is not shown to the policy in observations, and not accepted from it in actions."""
_UNTOLD = (_METADATA, "done", "reward")
"""Observation fields that are not shown to the policy."""


class OpenEnvEnv(TextGame):
    """A text environment that is served by OpenEnv."""

    def __init__(
        self,
        url: str | None = None,
        command: list[str] | None = None,
        reset: Mapping[str, Any] | None = None,
        action_key: str | None = None,
        observation_key: str | None = None,
        action_format: ActionFormat = "plain",
        system: str | None = None,
        start_timeout_seconds: float = 50.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """Check the options. The first reset starts the server, if necessary, and connects to it.

        ``url`` is the server's address; ``command`` is a program that serves on the port that replaces ``{port}``.
        docs/environments.md explains the other options. Raises `BadOption`.
        """
        super().__init__(render_mode)
        if (url is None) == (command is None):
            raise BadOption("url", "a server has an address or is started here", "set one of `url` and `command`")
        if url is not None and urlsplit(url).scheme not in ("http", "https", "ws", "wss"):
            raise BadOption("url", f"{url!r} is no address", "write `http://host:port`")
        if command is not None and not any(PORT in word for word in command):
            raise BadOption("command", "it does not say where the port goes", f"write `{PORT}` in its place")
        if command is not None and "/" not in command[0] and shutil.which(command[0]) is None:
            raise BadOption("command", f"there is no program {command[0]!r}", "name one of PATH, or its whole path")
        self._url, self._command, self._start_seconds = url, command, start_timeout_seconds
        self._reset_data = dict(reset or {})
        self._action_key, self._observation_key, self._format = action_key, observation_key, action_format
        self._system = system
        self._fields: dict[str, Any] | None = None
        """Schema of each action field; None until known."""
        self._definitions: dict[str, Any] = {}
        """Definitions (`$defs`) to which these schemas refer."""
        self._lock = threading.Lock()
        self._closed = False
        self._server: _Server | None = None
        self._session: _Session | None = None
        self._shown: list[str] = []

    def render(self) -> str:
        """Return the exchange since the reset."""
        return "\n".join(self._shown)

    def close(self) -> None:
        """Disconnect; a running call then raises. Ends a server that was started here and has no other user."""
        with self._lock:
            self._closed = True
        self._leave()

    def _begin(self, seed: int | None) -> ResetAnswer:
        data = self._reset_data if seed is None else {"seed": seed, **self._reset_data}
        observation, _, over = self._at_reset(data)
        if over:
            raise RuntimeError("the server says that the episode is over at its reset")
        text = self._text_of(observation)
        self._shown = [text]
        return text, {"state": text, **self._instructions()}

    def _act(self, text: str) -> StepAnswer:
        answer = answer_in(text, self._format)
        action = None if answer is None else self._action(answer)
        if action is None:
            return self._refused("no action was found in the answer")
        assert self._session is not None
        try:
            observation, reward, over = self._session.ask("step", action)
        except _Refused as refused:
            return self._refused(str(refused))
        told = self._text_of(observation)
        self._shown += [text, told]
        return told, reward, over, False, {"state": self.render()}

    def _refused(self, why: str) -> StepAnswer:
        told = f"That could not be carried out: {why}"
        self._shown += [told]
        return told, 0.0, False, False, {"action_is_valid": False, "state": self.render()}

    def _at_reset(self, data: Mapping[str, Any]) -> _Told:
        """Reset the session. A connection that was lost since the last episode is reopened."""
        for is_last in (False, True):
            kept = self._session
            try:
                return self._connected().ask("reset", data)
            except _Lost:
                self._leave()
                if is_last or kept is None:
                    raise
        raise AssertionError

    def _connected(self) -> _Session:
        if self._session is not None:
            return self._session
        try:
            return self._connect()
        except BaseException:
            self._leave()
            raise

    def _connect(self) -> _Session:
        server = None if self._command is None else _SERVERS.take(self._start_seconds, *self._command)
        with self._lock:
            self._server = server
        url = self._url if server is None else server.url
        assert url is not None
        if self._action_key is None and self._fields is None:
            self._fields, self._definitions = _action_fields(url)
            self._action_key = _only_text(self._fields)
        session = _Session(url)
        with self._lock:
            self._session = session
            if self._closed:
                raise RuntimeError("the environment was closed")
        return session

    def _leave(self) -> None:
        with self._lock:
            session, self._session = self._session, None
            server, self._server = self._server, None
        if session is not None:
            session.close()
        if server is not None:
            _SERVERS.give_back(server)

    def _instructions(self) -> dict[str, str]:
        if self._system is not None:
            return {"system": self._system}
        if self._action_key is not None:
            return {}
        told = [self._fields, {"$defs": self._definitions}] if self._definitions else [self._fields]
        schema = " ".join(json.dumps(each, ensure_ascii=False) for each in told)
        return {"system": f"Answer with an action: one JSON object with these fields. {schema}"}

    def _action(self, answer: str) -> dict[str, Any] | None:
        if self._action_key is not None:
            return {self._action_key: answer}
        action = _object_in(answer)
        return None if action is None else {key: value for key, value in action.items() if key != _METADATA}

    def _text_of(self, observation: Mapping[str, Any]) -> str:
        if self._observation_key is not None:
            if self._observation_key not in observation:
                known = ", ".join(f"`{key}`" for key in observation)
                raise ValueError(f"the observation has no `{self._observation_key}` (observation_key); it has {known}")
            told = observation[self._observation_key]
        else:
            told = {key: value for key, value in observation.items() if key not in _UNTOLD}
            if len(told) == 1:
                (told,) = told.values()
        return told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)


_Told = tuple[dict[str, Any], float, bool]
"""Observation, reward, and True at the end of the episode."""


class _Refused(Exception):
    """The server rejected an action of the policy as invalid."""


class _Lost(ConnectionError):
    """The connection was lost."""


class _Session:
    """A connection to the server."""

    def __init__(self, url: str) -> None:
        """Connect. Raises `Unavailable`."""
        address = _address(url, "ws", "/ws")
        self._url = url
        # No ping timeout: a server may be busy up to the run's own time limits.
        options: dict[str, Any] = {"proxy": None} if urlsplit(url).hostname in _LOCAL else {}
        self._leaving = ExitStack()
        try:
            connecting = connect(
                address, ping_interval=None, max_size=_LARGEST_MESSAGE, close_timeout=_CLOSE_SECONDS, **options
            )
            self._socket = self._leaving.enter_context(connecting)
        except (OSError, WebSocketException) as cause:
            raise Unavailable(f"no connection to the OpenEnv server at {url}: {_said(cause)}") from cause

    def ask(self, kind: str, data: Mapping[str, Any]) -> _Told:
        """Send a request and return the result. Raises `_Refused`, `_Lost`, and `RuntimeError` for server errors."""
        try:
            with suppress(WebSocketException):  # a server that has closed the connection may have said why before
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv())
        except (OSError, WebSocketException) as cause:
            raise _Lost(f"the connection to the OpenEnv server at {self._url} ended: {_said(cause)}") from cause
        told = answer.get("data", {})
        if answer.get("type") == "observation":
            return told["observation"], float(told.get("reward") or 0.0), bool(told.get("done"))
        code, message = told.get("code"), told.get("message")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise _Refused("; ".join(_misfit(each) for each in told.get("errors", ())) or str(message))
        remedy = ""
        if code == "CAPACITY_REACHED":
            remedy = "; raise its `max_concurrent_envs`, or lower `env_workers.max_sessions`"
        raise RuntimeError(f"the OpenEnv server at {self._url} failed in a {kind}: {message} ({code}){remedy}")

    def close(self) -> None:
        """Close the connection. A call running in another thread raises."""
        self._leaving.close()


class _Server:
    """A server process started by this process."""

    def __init__(self, seconds: float, *command: str) -> None:
        """Start the server on a free port, and wait up to ``seconds`` until it answers. Raises `Unavailable`."""
        deadline = time.monotonic() + seconds
        for attempt in range(_MOST_PORTS):
            with _kept_port() as kept:
                self._port = int(kept.getsockname()[1])
                if attempt:  # some servers cannot listen on a port that is already bound
                    kept.close()
                self.url = f"http://127.0.0.1:{self._port}"
                words = [word.replace(PORT, str(self._port)) for word in command]
                self._process = guarded(words, stdout=PIPE, stderr=STDOUT)
                assert self._process.stdout is not None
                self._words = LastWords(self._process.stdout, "OpenEnv server")
                if self._answers(deadline):
                    return
            if "address already in use" not in str(self._words).lower():
                break
        raise Unavailable(f"the OpenEnv server `{' '.join(command)}` does not start; {self._words}")

    def is_alive(self) -> bool:
        return self._runs() and not _is_free(self._port)

    def end(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self._process.wait()

    def _runs(self) -> bool:
        return self._process.poll() is None

    def _answers(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            if not self._runs():
                return False
            try:
                _get(f"{self.url}/health")
                return self._runs()
            except urllib.error.HTTPError:
                return self._runs()
            except (OSError, HTTPException):
                with suppress(TimeoutExpired):
                    self._process.wait(_POLL_SECONDS)
        self.end()
        return False


_SERVERS: Shared[_Server] = Shared(_Server)


def _kept_port() -> socket.socket:
    """Return a socket bound to a free port. While it is open, no other process is given this port.

    Otherwise a server of another worker could take the port while ours starts, and we would connect to that one.
    Servers whose socket reuses addresses, as most libraries' do, can nevertheless listen on the port.
    """
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind, or two could be given the same port
    return kept


def _is_free(port: int) -> bool:
    """Return True if nothing listens on the port. A server that has just died no longer counts."""
    with socket.socket() as probe:
        probe.settimeout(10.0)
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def _get(url: str) -> bytes:
    handlers = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in _LOCAL else []
    with urllib.request.build_opener(*handlers).open(url, timeout=10) as answer:
        return bytes(answer.read())


def _address(url: str, scheme: str, path: str) -> str:
    """Return the address of a path of the server. ``scheme``: `http` or `ws`; the URL says whether it is secure."""
    parts = urlsplit(url)
    secure = "s" if parts.scheme in ("https", "wss") else ""
    return parts._replace(scheme=scheme + secure, path=f"{parts.path.rstrip('/')}{path}").geturl()


def _action_fields(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fetch the schema of the server's actions: fields, and definitions they refer to. Raises `Unavailable`."""
    address = _address(url, "http", "/schema")
    try:
        schema = json.loads(_get(address))["action"]
        fields, definitions = schema.get("properties", {}), schema.get("$defs", {})
    except (OSError, HTTPException, ValueError, LookupError, AttributeError) as cause:
        remedy = "set `action_key`, or see that it is there"
        raise Unavailable(
            f"the OpenEnv server does not tell its actions at {address}: {_said(cause)}; {remedy}"
        ) from cause
    return {key: value for key, value in fields.items() if key != _METADATA}, definitions


def _only_text(fields: Mapping[str, Any]) -> str | None:
    """Return the name of the action's only field if it is a string, else None."""
    (key, *others) = fields or [None]
    return key if key is not None and not others and fields[key].get("type") == "string" else None


def _object_in(text: str) -> dict[str, Any] | None:
    """Decode the text from its first to its last brace as a JSON object; None if it is not one."""
    try:
        found = json.loads(text[text.find("{") : text.rfind("}") + 1])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _misfit(error: Mapping[str, Any]) -> str:
    where: Sequence[Any] = error.get("loc", ())
    return f"{'.'.join(map(str, where))}: {error.get('msg')}"


def _said(cause: BaseException) -> str:
    return " ".join(str(cause).split()) or type(cause).__name__
