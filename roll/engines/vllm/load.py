"""What vLLM tells of its load after each step, added up in the engine's own process.

vLLM hands its statistics to loggers. A logger in the place of the one for Prometheus is all that runs here, so none of
its histograms are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import PrometheusStatLogger

from roll.engines.base import EngineLoad

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


def load_logger(load: EngineLoad) -> type[PrometheusStatLogger]:
    """Return a logger that adds to ``load``, to be given to vLLM, which makes it."""

    class LoadLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
            pass  # the base class would register its metrics

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
        ) -> None:
            if iteration_stats is not None:
                load.preemptions += iteration_stats.num_preempted_reqs
            if scheduler_stats is None:
                return
            load.steps += 1
            load.running += scheduler_stats.num_running_reqs
            load.waiting += scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            load.cache_use += scheduler_stats.kv_cache_usage
            load.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
            load.shared_tokens += scheduler_stats.prefix_cache_stats.hits

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return LoadLogger
