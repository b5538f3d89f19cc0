"""Advantage estimators by name, and what happens to advantages afterwards.

One file per family; the modules imported here register their estimators.
"""

from roll.algorithms.advantages import gae, gigpo, group_relative, reinforce_plus_plus, remax, returns, turns

__all__ = ["gae", "gigpo", "group_relative", "reinforce_plus_plus", "remax", "returns", "turns"]
