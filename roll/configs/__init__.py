"""The configuration that a user may write, and the checks that it can work.

`load_config` reads and types a file, `check_config` checks it as a whole, `plan` prints its arithmetic. Nothing here
imports torch, ray or an engine.
"""

from roll.configs.checks import check_config, config_warnings
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.loader import dump_config, load_config

__all__ = ["ConfigError", "ConfigProblem", "check_config", "config_warnings", "dump_config", "load_config"]
