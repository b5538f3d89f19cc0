"""Environments: text in, text out, through gymnasium's interface (`base`).

Importing this package registers the built-in ones with gymnasium (`gymnasium.make("roll/FrozenLake-v0")`).
"""

from roll.agentic.env.registry import register_built_ins

register_built_ins()
