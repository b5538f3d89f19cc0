"""Environments: text in, text out, by gymnasium's interface (`base`).

Importing this package makes the built-in ones known to gymnasium (`gymnasium.make("roll/FrozenLake-v0")`).
"""

from roll.agentic.env.registry import register_built_ins

register_built_ins()
