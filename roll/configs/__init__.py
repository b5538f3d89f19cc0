"""The configuration that a user may write: every key, as plain dataclasses, and the loader.

The loader validates a YAML tree against these types with pydantic: an unknown key, a wrong type or an impossible value
is an error with its path. Fields carry their explanation in ``metadata["help"]``, numbers their range in their type;
the reference page in ``docs/`` is generated from both. The modules import nothing heavier than the standard library and
pydantic, and hold no logic beyond defaults: `roll.check` decides if values fit together.
"""
