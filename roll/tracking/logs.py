"""Quiet, complete logging without secrets: a file per role, and only warnings on the driver's terminal.

Redaction looks for names (``api_key: …``, ``HF_TOKEN=…``) and for the values of such environment variables, wherever
they occur in a text. It is a safety net for logs, not a reason to print secrets.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

MASK = "***"

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SHORTEST_SECRET = 6
"""Shorter values of environment variables are not redacted: they would occur in ordinary text by accident."""

_SECRET_WORD = re.compile(r"secret|password|passwd|api[_-]?key|access[_-]?key|private[_-]?key|credential")
_TOKENIZER_WORD = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask|stop)_token")
# Names are matched from their first character only and never backtracked, so a long word costs only its length.
_NAME = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]++)["']?[ \t]*+[:=][ \t]*+""")
_VALUE = re.compile(r""""[^"\n]*"|'[^'\n]*'|[^\s,;&})\]]+""")
_BEARER = re.compile(r"(?P<name>\bbearer\s+)[\w.~+/=-]+", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<name>\w://[^\s:/@]*:)[^\s/@]+(?=@)")


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with everything that looks like a secret replaced by ``***``.

    These are redacted: the value after a name that contains secret, password, api_key, access_key, private_key or
    credential, or ends in token; bearer tokens; passwords in URLs; and the values of environment variables with such
    names. ``environ`` defaults to the process environment.
    """
    for value in _secret_values(os.environ if environ is None else environ):
        text = text.replace(value, MASK)
    for pattern in (_BEARER, _URL_PASSWORD):
        text = pattern.sub(rf"\g<name>{MASK}", text)
    return _mask_assignments(text)


def _mask_assignments(text: str) -> str:
    """Mask values after secret names. Name and value are two searches, which keeps the time linear in the text."""
    pieces, copied = [], 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end()) if _is_secret_name(name["name"]) else None
        if value is not None and name.start() >= copied:
            pieces += [text[copied : name.end()], MASK]
            copied = value.end()
    return "".join([*pieces, text[copied:]])


def _is_secret_name(name: str) -> bool:
    """Return True for the name of a secret.

    `token` counts at the end only (`max_new_tokens` is a number), and not in the words of a tokenizer.
    """
    name = name.lower()
    if _SECRET_WORD.search(name):
        return True
    return name.endswith("token") and not _TOKENIZER_WORD.search(name)


def _secret_values(environ: Mapping[str, str]) -> list[str]:
    """Return the secret values, longest first, so that a secret inside a longer one leaves no rest of it."""
    values = {
        value for name, value in environ.items() if len(value) >= _SHORTEST_SECRET and _is_secret_name(name)
    }
    return sorted(values, key=len, reverse=True)


class _RedactingFormatter(logging.Formatter):
    """Formatter that redacts the finished text, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _TerminalHandler(logging.Handler):
    """Handler that writes to the present `sys.stderr`, so that lines appear above a live view and not inside it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except OSError:
            self.handleError(record)


def configure_logging(log_dir: Path | None, role: str, console: bool = False) -> Path | None:
    """Send this process's log to ``<log_dir>/<role>.log`` and, with ``console``, warnings to the terminal as well.

    Messages of this project are logged from INFO, those of libraries from WARNING. Python's own warnings go to the file
    only. A second call replaces the handlers of the first. Returns the file (``None`` without ``log_dir``); raises
    `OSError` naming a file that cannot be opened.
    """
    handlers: list[logging.Handler] = []
    file_path = None if log_dir is None else role_file(log_dir, role, ".log")
    if file_path is not None:
        file_path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file_path, encoding="utf-8", errors="backslashreplace"))
    if console:
        terminal = _TerminalHandler()
        terminal.setLevel(logging.WARNING)
        terminal.addFilter(lambda record: record.name != "py.warnings")
        handlers.append(terminal)
    for handler in handlers:
        handler.setFormatter(_RedactingFormatter(_FORMAT))
    _replace_handlers(handlers)
    logging.getLogger("roll").setLevel(logging.INFO)
    logging.captureWarnings(True)
    return file_path


def _replace_handlers(handlers: list[logging.Handler]) -> None:
    """Replace our handlers, which are known by their formatter. Handlers of other code stay."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler.formatter, _RedactingFormatter):
            root.removeHandler(handler)
            handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.WARNING)


def role_file(log_dir: Path, role: str, suffix: str) -> Path:
    """Return one file inside the folder for any role name: ``rewards.math/0`` -> ``rewards.math_0.log``."""
    name = re.sub(r"[^\w.-]+", "_", role).strip(".") or "unnamed"
    return Path(log_dir) / f"{name}{suffix}"
