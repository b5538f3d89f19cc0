"""Plug-in trackers with something wrong with them, or nothing; they run in processes of their own."""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Options:
    after: int = 0
    """From this step on something is wrong."""


class Diary:
    """Nothing is wrong: everything is written down."""

    Options = Options
    package = None
    install = ""

    def __init__(self, run, options):
        self.file = Path(run.folder) / "diary.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.options = options
        self.write({"run": asdict(run)})

    @staticmethod
    def secret(options):
        return None

    @staticmethod
    def mode(options):
        return "diary"

    @property
    def where(self):
        return str(self.file)

    def write(self, record):
        with open(self.file, "a") as file:
            print(json.dumps(record), file=file)

    def log(self, metrics, step):
        self.write({"step": step, "pid": os.getpid(), **metrics})

    def finish(self, ending):
        self.write({"ending": asdict(ending), "exit_code": ending.exit_code})


class NeverBegins(Diary):
    def __init__(self, run, options):
        raise ConnectionError("no such project; api_key=s3cr3t-in-error")


class BeginsForEver(Diary):
    def __init__(self, run, options):
        time.sleep(3600)


class Hangs(Diary):
    def log(self, metrics, step):
        super().log(metrics, step)
        if step >= self.options.after:
            time.sleep(3600)


class Refuses(Diary):
    def log(self, metrics, step):
        if step >= self.options.after:
            raise ValueError("too many points")
        super().log(metrics, step)


class Dies(Diary):
    def log(self, metrics, step):
        super().log(metrics, step)
        if step >= self.options.after:
            os.kill(os.getpid(), signal.SIGSEGV)


class LeavesPython(Diary):
    def log(self, metrics, step):
        sys.exit(3)


class EndsForEver(Diary):
    def finish(self, ending):
        time.sleep(3600)


class Talks(Diary):
    def log(self, metrics, step):
        print("buy our service")
        os.write(1, b"native greetings\n")
        super().log(metrics, step)
