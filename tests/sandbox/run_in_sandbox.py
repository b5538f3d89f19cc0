"""Runs one program in a sandbox and prints the result: for tests that need another user than their own.

Standard input: a JSON object with `level`, `code`, `stdin` and `limits`.
"""

import dataclasses
import json
import sys

from roll.sandbox.sandbox import Limits, Sandbox

if __name__ == "__main__":
    task = json.load(sys.stdin)
    sandbox = Sandbox(levels=[task["level"]], accept_weak=True)
    result = sandbox.run(task["code"], stdin=task["stdin"], limits=Limits(**task["limits"]))
    json.dump(dataclasses.asdict(result), sys.stdout)
