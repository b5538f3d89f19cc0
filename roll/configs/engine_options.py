"""The options of engines and trainers that the arithmetic reads, with their allowed values, declared once.

`strategy_config` goes to the engine unchanged, and each strategy knows its own option names. But ranks and memory are
computed from some options before an engine is asked, even if it is not installed. `roll.check.rules` checks these
options, and the arithmetic reads them only through `Options`. It rejects undeclared names, so no option is read
unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.configs.fields import LARGEST_NUMBER, Range
from roll.configs.rewards import RewardConfig
from roll.configs.roles import WorkerConfig

_ABSENT = object()
_AUTO = "auto"
"""A value for which DeepSpeed, like transformers' trainer, uses a key's default."""


@dataclass(frozen=True)
class Option:
    """The allowed values of one option."""

    words: str
    """Description for messages: ``a whole number >= 1``."""
    takes: Callable[[Any], bool]
    left_out: tuple[str | None, ...] = ()
    """Values for which the engine uses its own default."""

    def __str__(self) -> str:
        others = ["`null`" if value is None else f"`{value}`" for value in self.left_out]
        return ", or ".join([self.words, *others])


def _number(limits: Range, *left_out: str | None) -> Option:
    return Option(f"a number {limits}", lambda value: _is_number(value) and limits.contains(value), left_out)


def _whole(limits: Range, *left_out: str | None, as_float: bool = False) -> Option:
    """Declare a whole number; with ``as_float`` the engine also accepts ``2e9``."""

    def takes(value: Any) -> bool:
        is_whole = isinstance(value, int) or (as_float and isinstance(value, float) and value.is_integer())
        return is_whole and _is_number(value) and limits.contains(value)

    return Option(f"a whole number {limits}".rstrip(), takes, left_out)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not is_too_large(value)


def is_too_large(value: Any) -> bool:
    """Return True if a value is a number too large for the arithmetic."""
    return isinstance(value, int | float) and abs(value) > LARGEST_NUMBER


def _one_of(*choices: str | int, left_out: tuple[str | None, ...] = ()) -> Option:
    words = f"one of {', '.join(f'`{choice}`' for choice in choices)}"
    return Option(words, lambda value: not isinstance(value, bool) and value in choices, left_out)


def _section(*left_out: str | None) -> Option:
    return Option("a mapping", lambda value: isinstance(value, Mapping), left_out)


_SWITCH = Option("true or false", lambda value: isinstance(value, bool))
_POSITIVE, _SHARE = Range(at_least=1), Range(above=0, at_most=1)
_DEVICE = _one_of("none", "cpu", "nvme", left_out=(_AUTO,))

OPTIONS: dict[str, dict[str, Option]] = {
    "vllm": {
        "gpu_memory_utilization": _number(_SHARE),
        "kv_cache_memory_bytes": _whole(Range(at_least=0), None, as_float=True),
        "max_num_batched_tokens": _whole(_POSITIVE, None, as_float=True),
        "max_num_seqs": _whole(_POSITIVE, None, as_float=True),
        "enforce_eager": _SWITCH,
    },
    "sglang": {
        "mem_fraction_static": _number(_SHARE, None),
        "max_running_requests": _whole(_POSITIVE, None),
        "chunked_prefill_size": _whole(Range(), None),
        "disable_cuda_graph": _SWITCH,
        "sampling_mask_max_tokens": _whole(_POSITIVE),
    },
    "hf_infer": {"max_running_requests": _whole(_POSITIVE), "max_prefill_tokens": _whole(_POSITIVE)},
    "fsdp2_train": {
        "reshard_after_forward": _SWITCH,
        "gradient_checkpointing": _SWITCH,
        "offload": _one_of("none", "cpu"),
    },
    "deepspeed_train": {
        "gradient_checkpointing": _SWITCH,
        "zero_optimization": _section(),
        "zero_optimization.stage": _one_of(0, 1, 2, 3),
        "zero_optimization.reduce_bucket_size": _whole(_POSITIVE, _AUTO, as_float=True),
        "zero_optimization.offload_optimizer": _section(None, _AUTO),
        "zero_optimization.offload_optimizer.device": _DEVICE,
        "zero_optimization.offload_param": _section(None, _AUTO),
        "zero_optimization.offload_param.device": _DEVICE,
    },
    "megatron_train": {
        "tensor_model_parallel_size": _whole(_POSITIVE),
        "pipeline_model_parallel_size": _whole(_POSITIVE),
        "expert_model_parallel_size": _whole(_POSITIVE),
        "expert_tensor_parallel_size": _whole(_POSITIVE, None),
        "sequence_parallel": _SWITCH,
        "use_distributed_optimizer": _SWITCH,
        "recompute_granularity": _one_of("full", "selective", left_out=(None,)),
        "recompute_method": _one_of("uniform", "block", left_out=(None,)),
        "recompute_num_layers": _whole(_POSITIVE, None),
    },
}
"""Strategy -> path of an option -> allowed values. The entry of `hf_infer` is for the engine; the reference has no
options."""


@dataclass(frozen=True)
class Options:
    """The declared options of one ``strategy_config``."""

    strategy: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, role: WorkerConfig | RewardConfig) -> Options:
        """Return the options of a role."""
        return cls(role.strategy_args.strategy_name, role.strategy_args.strategy_config)

    def get(self, path: str, default: Any) -> Any:
        """Return the value at ``path``, or ``default`` if it is left out or not allowed (another rule reports that).

        Raises ``KeyError`` for an option that is not declared.
        """
        value = self._given(path)
        return value if OPTIONS[self.strategy][path].takes(value) else default

    def wrong(self) -> Iterator[tuple[str, Any, Option]]:
        """Yield path, value and option of each value that is not allowed."""
        for path, option in OPTIONS.get(self.strategy, {}).items():
            value = self._given(path)
            if value is not _ABSENT and value not in option.left_out and not option.takes(value):
                yield path, value, option

    def _given(self, path: str) -> Any:
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        return value
