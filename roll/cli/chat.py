"""`roll chat MODEL`: talks in a terminal to a finished model, or to a model that is served elsewhere."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from roll.cli.main import FAILURE, SUCCESS, command_parser
from roll.cli.serve import add_model_options, is_loopback, served_here, started
from roll.configs.plugins import problem
from roll.tracking.files import say

_EPILOG = """\
examples:
  roll chat output/quickstart/latest --temperature 0
  roll chat output/agent/latest --system "Answer in one word."
  roll chat --url http://127.0.0.1:8000
  echo "What is 2 + 2?" | roll chat output/quickstart/latest

/reset begins again, /quit ends, and so does the end of the input. Ctrl-C stops an answer.
exit codes: 0 it was ended; 2 there is no such model, or it cannot be loaded; 1 the model did not answer.
"""


class NoAnswer(Exception):
    """The server refused a request, or cannot be reached. The message says why."""


def main(arguments: Sequence[str]) -> int:
    """Hold a conversation; return the exit code."""
    parser = command_parser("chat", "Talk to a finished model in a terminal.", _EPILOG)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for `roll serve`; without it give `--url`")
    parser.add_argument("--url", help="address of a model that is served, which then needs no other option than a key")
    parser.add_argument("--api-key", default="none", help="key of the model at `--url`")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_model_options(parser)
    options, usual = parser.parse_intermixed_args(arguments), vars(parser.parse_args([]))
    ours = ("model", "url", "api_key", "system")
    given = [name for name, value in vars(options).items() if name not in ours and value != usual[name]]
    try:
        if options.url is not None and given:
            unused = ", ".join(f"`--{name.replace('_', '-')}`" for name in given)
            raise problem("--url", f"{unused} has no effect on a model that is served", "give it to `roll serve`")
        with _address(options) as url:
            return _converse(Client(url, options.api_key), options.system)
    except NoAnswer as error:
        say(str(error), error=True)
        return FAILURE
    except KeyboardInterrupt:
        return SUCCESS


class Client:
    """A client of chat completions."""

    def __init__(self, url: str, key: str) -> None:
        """``url`` ends with `/v1`. Raises `NoAnswer` if no model is served there."""
        self._url, self._key = url, key
        try:
            is_here = is_loopback(urlsplit(url).hostname)
        except ValueError as error:
            raise NoAnswer(f"no model answers at {url}: {error}") from error
        # No proxy between this process and a server on the same machine.
        proxies: dict[str, str] | None = {} if is_here else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        with self._opened("models") as response:
            self.model = str(json.load(response)["data"][0]["id"])

    def answer(self, messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        """Yield the pieces of an answer as they arrive, each with its kind: `reasoning_content` or `content`.

        Raises `NoAnswer`.
        """
        ended = False
        with self._opened("chat/completions", {"model": self.model, "messages": messages, "stream": True}) as response:
            for line in self._lines(response):
                name, _, data = line.decode().strip().partition(":")
                if name != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise NoAnswer(event["error"]["message"])
                for choice in event["choices"]:
                    ended = ended or bool(choice.get("finish_reason"))
                    for kind in ("reasoning_content", "content"):
                        if piece := choice["delta"].get(kind):
                            yield kind, piece
        if not ended:
            raise NoAnswer(f"the answer of {self._url} broke off")

    def _lines(self, response: Iterable[bytes]) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"the answer of {self._url} broke off: {error}") from error

    @contextmanager
    def _opened(self, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(urllib.request.Request(f"{self._url}/{path}", data, headers)) as response:
                yield response
        except urllib.error.HTTPError as refused:
            text = refused.read().decode(errors="replace")
            try:
                message = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"{refused.code} {refused.reason}: {text[:200]}"
            raise NoAnswer(str(message)) from refused
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoAnswer(f"no model answers at {self._url}: {error}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise NoAnswer(f"what answers at {self._url} is no server of chat completions") from error


@contextmanager
def _address(options: argparse.Namespace) -> Iterator[str]:
    """Provide the address of the model, which is `--url`, or a server for this process alone."""
    if (options.url is None) == (options.model is None):
        raise problem("MODEL", "a conversation is with one model", "name its folder, or where it is served (`--url`)")
    if options.url is not None:
        yield f"{options.url.rstrip('/').removesuffix('/v1')}/v1"
        return
    with started(served_here(options)) as served:
        yield served.address


def _converse(client: Client, system: str | None) -> int:
    """Talk until the end of the input; return the exit code."""
    begun = [] if system is None else [{"role": "system", "content": system}]
    messages: list[dict[str, Any]] = [*begun]
    is_terminal = sys.stdin.isatty()
    say(f"talking to {client.model}; /reset begins again, /quit ends")
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except EOFError:
            return SUCCESS
        if text == "/quit":
            return SUCCESS
        if text == "/reset":
            messages = [*begun]
            say("begun again")
        elif text:
            said = _said(client, [*messages, {"role": "user", "content": text}], is_terminal)
            if said is not None:
                messages += [{"role": "user", "content": text}, said]


def _said(client: Client, messages: list[dict[str, Any]], is_terminal: bool) -> dict[str, Any] | None:
    """Print an answer as it arrives, and return it as a message; None if it was interrupted or failed.

    At a terminal a failure is printed; otherwise `NoAnswer` is raised.
    """
    parts = {"reasoning_content": "", "content": ""}
    try:
        for kind, piece in client.answer(messages):
            if kind == "content" and parts["reasoning_content"] and not parts["content"]:
                print("\n---", flush=True)
            parts[kind] += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        say("\nstopped")
        return None
    except NoAnswer as error:
        if not is_terminal:
            raise
        say(f"{error}\n/reset begins again", error=True)
        return None
    print(flush=True)
    return {"role": "assistant", **{kind: text for kind, text in parts.items() if text or kind == "content"}}
