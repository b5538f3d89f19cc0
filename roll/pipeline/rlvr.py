"""The rollout side of RLVR: prompts are sampled, responses are judged by verifiers and reward models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from roll.configs.schema import GeneratingArguments, RLVRConfig
from roll.data.interleave import PromptStream
from roll.data.records import Group, Prompt
from roll.pipeline.rewards import Rewards
from roll.pipeline.rollout_function import RolloutFunction
from roll.pipeline.rollout_side import Generator
from roll.pipeline.sampling import sampling_params
from roll.pipeline.validation import PromptValidator
from roll.rollout.schedule import Ticket

if TYPE_CHECKING:
    from roll.distributed.group import WorkerHandle
    from roll.pipeline.preflight import Prepared


class RLVRSide:
    """The `RolloutSide` of RLVR."""

    sample_metrics = "reward"

    def __init__(
        self,
        prepared: Prepared,
        prompts: Sequence[Prompt],
        validation_prompts: Sequence[Prompt],
        rewards: Rewards,
    ) -> None:
        if not isinstance(prepared.config, RLVRConfig):
            raise TypeError(f"this is the rollout side of rlvr, not of {prepared.config.pipeline}")
        self._prepared = prepared
        self._config = prepared.config
        self._prompts = prompts
        self._validation_prompts = validation_prompts
        self.workers = rewards

    def canary_prompts(self) -> list[np.ndarray]:
        """Return the training prompts."""
        return [prompt.token_ids for prompt in self._prompts]

    def source(self) -> Iterator[Prompt]:
        """Return the training prompts, interleaved by domain and shuffled at each epoch."""
        data_args = self._config.actor_train.data_args
        return iter(
            PromptStream(
                self._prompts,
                seed=self._config.seed,
                shuffle=data_args.shuffle,
                domain_interleave_probs=data_args.domain_interleave_probs,
            )
        )

    def rollout(self, generator: Generator) -> Callable[[Ticket[Prompt]], Awaitable[Group]]:
        """Return the function that samples a prompt and judges the responses."""
        function = self._function(generator, self._config.actor_infer.generating_args, "train")

        def run_group(ticket: Ticket[Prompt]) -> Awaitable[Group]:
            return function(ticket.group_id, ticket.item, ticket.start_version)

        return run_group

    def validator(self, generator: Generator) -> PromptValidator | None:
        """Return the validator over the validation prompts; None without `validation`."""
        validation = self._config.validation
        if validation is None:
            return None
        return PromptValidator(
            self._validation_prompts,
            self._function(generator, validation.generating_args, "validation"),
            batch_size=self._config.val_batch_size,
            timeout_seconds=validation.timeout_seconds,
        )

    def handles(self) -> list[WorkerHandle]:
        """Return the processes of the reward models."""
        return self.workers.handles()

    def metrics(self) -> dict[str, float]:
        """Return the totals of the rewards. The verifiers' own metrics are in the metrics of samples."""
        return self.workers.metrics()

    def _function(self, generator: Generator, arguments: GeneratingArguments, purpose: str) -> RolloutFunction:
        """Return the function that makes a group, in training or in validation."""
        config, training = self._config, purpose == "train"
        return RolloutFunction(
            generator=generator,
            judge=self.workers,
            decoder=self._prepared.tokenizer,
            sampling=sampling_params(arguments, config.response_length),
            samples_per_group=config.num_return_sequences_in_group if training else arguments.num_return_sequences,
            run_seed=config.seed,
            purpose=purpose,
            separate_requests=config.is_num_return_sequences_expand,
            greedy_baseline=training and self._prepared.advantages.estimator.traits.needs_greedy_baseline,
        )
