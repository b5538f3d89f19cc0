"""The rollout side of image generation: a flow-matching model generates images, which are scored as they arrive.

It differs from RLVR only in what a sample is. Its sampled tokens are the stochastic denoising steps (SDE steps), and
one token stands for the prompt. All samples of a group share the same stochastic steps, drawn from (run seed, group
id).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from roll.algorithms.flow import window
from roll.configs import derived
from roll.configs.roles import GeneratingArguments, PictureSampling
from roll.configs.run import ImageConfig
from roll.data.records import PictureStep, Prompt, Sample, derive_seed
from roll.engines.base import Completion, GenerateRequest, PictureRequest
from roll.pipeline.rlvr import RLVRSide, RolloutFunction, sample_from_completion
from roll.pipeline.rollouts import Generator
from roll.rewards.base import RewardInput

PROMPT_TOKEN = np.zeros(1, np.int32)
"""Placeholder for the prompt in a sample's token ids. The model reads the prompt as text."""


class ImageSide(RLVRSide):
    """The rollout side of the image pipeline."""

    def canary_steps(self) -> list[PictureStep]:
        """Return denoising steps for the log-probability parity check, with prompts of the training data.

        The latents are noise, before and after a step: its log-probability then depends on where the model would lead.
        """
        from roll.pictures.model import Schedule  # loads diffusers

        config = derived.prompted(self._config)
        sampling = derived.picture_sampling(config)
        if sampling is None:
            raise TypeError("only a run of pictures has denoising steps")
        shape = Schedule.of(sampling, derived.model_path(config, config.actor_train)).latent_shape
        rng = np.random.default_rng(derive_seed(config.seed, "canaries"))
        steps, prompts = [], self._plan.prompts
        for number in range(config.weight_update.canary_prompts):
            prompt = prompts[int(rng.integers(len(prompts)))].text
            latents = np.repeat(rng.standard_normal((1, *shape), dtype=np.float32), 2, axis=0)
            steps.append(PictureStep(prompt, sampling, number % sampling.reach, latents))
        return steps

    def _function(self, generator: Generator, arguments: GeneratingArguments, purpose: str) -> RolloutFunction:
        config, plain = self._config, super()._function(generator, arguments, purpose)
        if not isinstance(config, ImageConfig):
            raise TypeError(f"a configuration of `pipeline: image` is needed here, not a {type(config).__name__}")
        return PictureFunction(**vars(plain) | {"greedy_baseline": False}, pictures=config.sampling)


@dataclass(frozen=True, kw_only=True)
class PictureFunction(RolloutFunction):
    """Generates the images of one group and their rewards. Training and validation have one object each."""

    pictures: PictureSampling

    def window_of(self, group_id: int) -> range | None:
        """Return a group's stochastic denoising steps (SDE steps). None in validation: all steps are deterministic."""
        if self.purpose != "train":
            return None
        sampling = self.pictures
        seed = derive_seed(self.run_seed, "window", group_id)
        return window(sampling.num_inference_steps, sampling.window_size, sampling.reach, seed)

    def _requests(self, group_id: int, prompt: Prompt) -> list[GenerateRequest]:
        picture = PictureRequest(prompt.text, self.pictures, self.window_of(group_id))
        plain = super()._requests(group_id, prompt)
        return [replace(each, prompt_token_ids=PROMPT_TOKEN, with_text=False, picture=picture) for each in plain]

    async def _judged_samples(
        self, prompt: Prompt, requests: Sequence[GenerateRequest], sticky_key: str | None, min_version: int | None
    ) -> tuple[list[Sample], float]:
        """Score images while others are still being generated. Images that arrive together are scored in one call."""
        drawing: list[asyncio.Task[Sample]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    drawing.append(tasks.create_task(self._sample(request, prompt, sticky_key, min_version)))
                missing = set(drawing)
                while missing:
                    come, missing = await asyncio.wait(missing, return_when=asyncio.FIRST_COMPLETED)
                    if any(task.cancelled() or task.exception() for task in come):
                        break  # the task group raises the error
                    pictures = [task.result() for task in drawing if task in come]
                    tasks.create_task(self._judge(prompt, pictures))
                generated = time.time()
            samples = [task.result() for task in drawing]
            for sample in samples[1:]:
                sample.image = None  # scored; only the first image of a group is recorded
            return samples, generated
        finally:
            self._forget(sticky_key)
            drawing.clear()  # breaks the reference cycle of exception and frame; garbage collection is rare

    def _from_completion(self, prompt: Prompt, completion: Completion) -> Sample:
        if completion.picture is None:
            raise ValueError(f"the engine has drawn no picture for {completion.request_id}")
        sample = sample_from_completion(replace(prompt, token_ids=PROMPT_TOKEN), completion, "")
        sample.image = completion.picture.image
        sample.newest_version = completion.picture.newest_version
        if self.purpose == "train":
            sample.latents, sample.means = completion.picture.latents, completion.picture.means
        return sample

    def _input(self, prompt: Prompt, sample: Sample) -> RewardInput:
        image = None if sample.image is None else Image.fromarray(sample.image)
        return replace(super()._input(prompt, sample), image=image)
