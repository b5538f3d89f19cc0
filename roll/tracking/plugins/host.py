"""The process of a plug-in tracker: it reads one JSON object per line and writes one for each report to the driver.

Everything that the library prints goes to the tracker's log. The process ends with the run: with the status that the
driver reports, or as failed if the driver disappears. A library that hangs then is killed, so no process stays behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from roll.tracking.plugins.contract import Ending, PlugIn, TrackerRun
from roll.tracking.plugins.registry import plug_in_class

ORPHAN_SECONDS = 60.0
"""Time for a tracker to write everything out after the driver has disappeared."""
_LOOK_SECONDS = 1.0


def main() -> None:
    """Serve the driver at the other end of standard input and output."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)
    # The driver handles Ctrl-C and reports how the run ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_as_an_orphan, args=(os.getppid(),), daemon=True).start()

    def reply(**words: Any) -> None:
        try:
            print(json.dumps(words, ensure_ascii=False), file=replies, flush=True)
        except OSError as error:
            print(f"the driver does not listen: {error}; {words}", file=sys.stderr)

    sys.exit(serve(sys.stdin.buffer, reply))


def serve(lines: Iterable[bytes], reply: Callable[..., None]) -> int:
    """Carry out the lines of the driver; return the exit code."""
    incoming = iter(lines)
    beginning = json.loads(next(incoming))
    try:
        plug_in = _begin(beginning)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reply(failed=_words(error))
        return 1
    reply(where=plug_in.where)
    for line in incoming:
        record = json.loads(line)
        if "ending" in record:
            return _finish(plug_in, Ending(**record["ending"]), reply)
        try:
            plug_in.log(record["metrics"], record["step"])
        except Exception as error:
            traceback.print_exc()
            reply(refused=_words(error), step=record["step"])
    return _finish(plug_in, Ending("failed", {}, "the process of the run ended without a word"), reply)


def _begin(beginning: dict[str, Any]) -> PlugIn:
    kind = plug_in_class(beginning["class_path"])
    return kind(TrackerRun(**beginning["run"]), kind.Options(**beginning["options"]))


def _finish(plug_in: PlugIn, ending: Ending, reply: Callable[..., None]) -> int:
    try:
        plug_in.finish(ending)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reply(unfinished=_words(error))
        return 1
    reply(finished=True)
    return 0


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _end_as_an_orphan(driver: int) -> None:
    while os.getppid() == driver:
        time.sleep(_LOOK_SECONDS)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
