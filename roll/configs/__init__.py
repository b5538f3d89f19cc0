"""Configuration: every key that a user may write, as plain dataclasses, and the loader.

The loader validates a YAML tree against these types with pydantic: an unknown key, a wrong type or an impossible value
is an error with its path. Each field carries its help text in ``metadata["help"]``, each number its range in its type;
the reference page in ``docs/`` is generated from both. No module here imports torch, Ray or an engine. The dataclasses
hold no logic beyond defaults; `roll.check` decides if values fit together.
"""
