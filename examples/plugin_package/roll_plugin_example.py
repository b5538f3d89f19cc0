"""A package that adds one plug-in of each kind. `pyproject.toml` beside it gives them their names."""

from dataclasses import dataclass

import gymnasium

from roll.agentic.base import AnyText
from roll.agentic.tools.base import Answer


def soft(inputs, *, strength: float = 1.0):
    """Policy loss: `pg_variant: soft`."""
    losses = -strength * inputs.advantages * inputs.logprobs
    return losses, {"clip_fraction": losses.detach() * 0}


def centred(inputs):
    """Advantage estimator: `adv_estimator: centred`."""
    scores = inputs.token_rewards.sum(-1, keepdim=True)
    return (scores - scores.mean()).expand_as(inputs.token_rewards)


def short(response: str, longest: int = 3):
    """Verifier: `rewards.<name>.verifier: short`."""
    return float(len(response) <= longest)


class Echo(gymnasium.Env):
    """Environment: `custom_envs.<tag>.env_type: echo`."""

    observation_space = action_space = AnyText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.digit = str(int(self.np_random.integers(10)))
        return self.digit, {}

    def step(self, action):
        return "", float(action == self.digit), True, False, {"success": action == self.digit}


class Upper:
    """Tool: `env_config.tools: [upper]` of an environment with tools."""

    name, description = "upper", "Return a text in capital letters."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def call(self, arguments, deadline):
        return Answer(arguments["text"].upper())

    def close(self):
        pass


async def count_groups(run, batch):
    """Stage: `stages: {count_groups: {after: rollout, use: count_groups}}`."""
    batch.metrics["my/groups"] = float(len(batch.groups))
    return batch


@dataclass
class LinesOptions:
    path: str = "metrics.txt"


class Lines:
    """Tracker: `track_with: [lines]`."""

    Options, package, install = LinesOptions, None, ""

    def __init__(self, run, options):
        self.where, self.file = options.path, open(options.path, "a")

    @staticmethod
    def secret(options):
        return None

    @staticmethod
    def mode(options):
        return "offline"

    def log(self, metrics, step):
        print(step, metrics.get("reward/mean"), file=self.file)

    def finish(self, ending):
        self.file.close()
