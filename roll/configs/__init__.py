"""The configuration that a user may write, and the checks that it can work.

`load_config` reads and types a file, `check_config` checks it as a whole, `plan` prints its arithmetic. Nothing here
imports torch, ray or an engine.

Every key that a user may write, as plain dataclasses.

The loader (`loader.py`) validates a YAML tree against these types with pydantic: an unknown key, a wrong type or an
impossible value is an error with its path. Fields carry their explanation in ``metadata["help"]`` and, if they are
numbers, their range in ``metadata["range"]``; the reference page in ``docs/`` is generated from both. The modules
import nothing heavier than the standard library, and hold no logic beyond defaults: ``checks.py`` checks ranges and
relations between keys.
"""
