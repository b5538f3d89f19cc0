"""Rules about restarts after a failure."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import ConfigProblem
from roll.configs.rules_keys import differs_from_default
from roll.configs.schema import PipelineConfig
from roll.configs.wording import count, shown


def restarts_can_help(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require a checkpoint to restart from, and an asynchronous run if it may fall back to ratio 0."""
    restarts = config.restarts
    if restarts.max_in_a_row == 0:
        for key in ("synchronous_after", "delay_seconds"):
            if differs_from_default(restarts, key):
                message = f"{shown(vars(restarts)[key])} has no effect: a failed run does not begin again"
                yield ConfigProblem(f"restarts.{key}", message, "set `restarts.max_in_a_row`, or remove this key")
        return
    if not 0 < config.save_steps < config.max_steps:
        message = f"{restarts.max_in_a_row} would each begin at step 0: the run writes no checkpoints on its way"
        yield ConfigProblem("restarts.max_in_a_row", message, "set `save_steps` below `max_steps`, or remove this key")
    for index, event in enumerate(config.chaos.events):
        if (event.kind, event.role) == ("fill_disk", "driver"):
            message = "fill_disk of the driver would last through its restarts, which are made by the same process"
            yield ConfigProblem(f"chaos.events[{index}]", message, "remove `restarts.max_in_a_row`")
    after = restarts.synchronous_after
    if after is None:
        return
    if after > restarts.max_in_a_row:
        restarted = count(restarts.max_in_a_row, "failure")
        message = f"{after} has no effect: no more than {restarted} in a row are followed by a restart"
        yield ConfigProblem("restarts.synchronous_after", message, f"set at most {restarts.max_in_a_row}")
    if config.async_generation_ratio == 0:
        message = f"{after} has no effect: the run is synchronous"
        yield ConfigProblem("restarts.synchronous_after", message, "remove it, or set `async_generation_ratio` above 0")
