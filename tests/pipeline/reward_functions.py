"""Rewards of the pipeline's tests, named in configurations as `reward_functions:name`."""

import asyncio
import hashlib
import os
import random
import time
from pathlib import Path


def digit_reward(response, ground_truth):
    """Something that differs between the responses of an untrained model: how many characters are right."""
    return sum(given == wanted for given, wanted in zip(response, ground_truth, strict=False)) + 0.1 * len(response)


def two_rewards(response, ground_truth):
    """The two parts of `digit_reward`; their weights make the same sum."""
    right = sum(given == wanted for given, wanted in zip(response, ground_truth, strict=False))
    return {"right": right, "long": len(response)}


def share_of_digits_reward(response, ground_truth):
    """Between 0 and 1: how many of the answer's characters are right and in their place."""
    return sum(given == wanted for given, wanted in zip(response, ground_truth, strict=False)) / len(ground_truth)


async def late_reward(response, ground_truth):
    """The same, after a wait that depends on chance."""
    await asyncio.sleep(random.expovariate(20))
    return digit_reward(response, ground_truth)


async def straggling_reward(response, ground_truth):
    """The same, for one prompt in eight a second later: the others are there long before."""
    await asyncio.sleep(random.expovariate(20) if int(ground_truth) % 8 else 1.0)
    return digit_reward(response, ground_truth)


def raising_reward(response):
    raise RuntimeError("the verifier of this test always fails")


def nonsense_reward(response):
    return float("nan")


def hanging_reward(response):
    time.sleep(3600)


def sometimes_failing_reward(response, ground_truth, prompt_id):
    """Fails for good on one prompt in ten."""
    fail_sometimes(prompt_id)
    return digit_reward(response, ground_truth)


def fail_sometimes(prompt_id):
    """Raise an error for one prompt in ten, always the same ones."""
    if int(hashlib.sha256(prompt_id.encode()).hexdigest(), 16) % 10 == 0:
        raise RuntimeError(f"prompt {prompt_id} cannot be judged")


def dying_once_reward(response, ground_truth, marker):
    """Kills its own process the first time it is called."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), 9)
    return digit_reward(response, ground_truth)


def slow_reward(response, ground_truth):
    time.sleep(0.05)
    return digit_reward(response, ground_truth)


def first_digit_reward(response):
    """0 or 1, so that small groups often agree."""
    return float(response[:1].isdigit())


def noted_reward(response, ground_truth, path):
    """Leaves a line for each response."""
    with open(path, "a") as file:
        file.write("judged\n")
    return digit_reward(response, ground_truth)
