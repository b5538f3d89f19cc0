"""One group of pictures: the requests it makes, and when each picture is judged."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from roll.configs.roles import PictureSampling
from roll.data.records import Prompt
from roll.engines.base import Completion, Picture, SamplingParams
from roll.pipeline.image import PictureFunction
from roll.rewards.base import RewardOutput
from tests.tiny_pictures import SAMPLING

PROMPT = Prompt("train.jsonl:1", "colours", np.arange(4, dtype=np.int32), "two blue", ground_truth="blue")


class Easel:
    """Draws when it is told to."""

    def __init__(self) -> None:
        self.requests = []
        self.drawn: dict[int, asyncio.Future[Completion]] = {}

    async def generate(self, request, *, sticky_key=None, min_version=None):
        self.requests.append(request)
        index = len(self.requests) - 1
        self.drawn[index] = asyncio.get_running_loop().create_future()
        return await self.drawn[index]

    def forget(self, sticky_key) -> None:
        """There is one replica."""

    def draw(self, *indices: int) -> None:
        for index in indices:
            request = self.requests[index]
            steps = np.array(request.picture.window or range(4), np.int32)
            picture = Picture(
                np.full((8, 8, 3), index, np.uint8), np.full((len(steps) + 1, 3, 8, 8), index, np.float32), 4
            )
            numbers = np.full(len(steps), -1.5, np.float32), np.full(len(steps), 3, np.int32)
            self.drawn[index].set_result(Completion(request.request_id, steps, *numbers, "stop", picture=picture))


class Judge:
    """Scores a picture by its first pixel, and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def score(self, domain, records):
        assert domain == "colours"
        pixels = [int(np.asarray(record.image)[0, 0, 0]) for record in records]
        assert all((record.prompt_text, record.ground_truth) == ("two blue", "blue") for record in records)
        self.calls.append(pixels)
        return [RewardOutput(float(pixel), {"pixel": float(pixel)}) for pixel in pixels]


def function(easel, judge, purpose="train", samples=4, **sampling) -> PictureFunction:
    return PictureFunction(
        generator=easel,
        judge=judge,
        decoder=None,
        sampling=SamplingParams(2),
        samples_per_group=samples,
        run_seed=7,
        purpose=purpose,
        pictures=PictureSampling(**SAMPLING | sampling),
    )


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_pictures_are_judged_as_they_come_and_those_that_come_together_in_one_call():
    async def play():
        easel, judge = Easel(), Judge()
        making = asyncio.ensure_future(function(easel, judge)(5, PROMPT, 3))
        await turns()
        assert len(easel.requests) == 4 and judge.calls == []
        easel.draw(2)
        await turns()
        assert judge.calls == [[2]] and not making.done()
        easel.draw(3, 0)
        await turns()
        assert judge.calls == [[2], [0, 3]] and not making.done()
        easel.draw(1)
        return await making, judge.calls

    group, calls = asyncio.run(play())
    assert calls == [[2], [0, 3], [1]]
    assert [sample.score for sample in group.samples] == [0.0, 1.0, 2.0, 3.0]
    for index, sample in enumerate(group.samples):
        assert sample.metrics == {"pixel": index}
        assert sample.response_mask.tolist() == [False, True, True]
        assert sample.versions.tolist() == [-1, 3, 3] and sample.behaviour_logprobs.tolist() == [0, -1.5, -1.5]
        assert sample.newest_version == 4, "of a step that is no token"
        assert sample.latents[0, 0, 0, 0] == index and len(sample.latents) == 3
    assert [sample.image is not None for sample in group.samples] == [True, False, False, False]


def test_a_group_has_one_window_seeds_of_its_own_and_is_the_same_each_time():
    async def requests(group_id: int, purpose: str = "train"):
        easel = Easel()
        making = asyncio.ensure_future(function(easel, Judge(), purpose, num_inference_steps=8)(group_id, PROMPT))
        await turns()
        easel.draw(0, 1, 2, 3)
        await making
        return easel.requests

    first, again = asyncio.run(requests(0)), asyncio.run(requests(0))
    assert first == again
    assert len({request.sampling.seed for request in first}) == 4
    windows = Counter(asyncio.run(requests(group))[0].picture.window for group in range(30))
    assert windows.keys() == {range(0, 2), range(1, 3)} and min(windows.values()) > 5
    assert {request.picture.window for request in first} == {first[0].picture.window}
    validation = asyncio.run(requests(0, "validation"))
    assert {request.picture.window for request in validation} == {None}
    assert {request.sampling.seed for request in validation}.isdisjoint(request.sampling.seed for request in first)


def test_a_picture_that_fails_ends_its_group_and_the_others_of_it():
    async def play():
        easel, judge = Easel(), Judge()
        making = asyncio.ensure_future(function(easel, judge)(5, PROMPT))
        await turns()
        easel.draw(0)
        await turns()
        easel.drawn[1].set_exception(RuntimeError("the brush is broken"))
        with pytest.raises(ExceptionGroup) as failed:
            await making
        assert [str(error) for error in failed.value.exceptions] == ["the brush is broken"]
        assert easel.drawn[2].cancelled() and easel.drawn[3].cancelled()

    asyncio.run(play())
