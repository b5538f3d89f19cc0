"""Print the tables of docs/scaling.md: simulated steps from 8 to 10,000 GPUs, weak and strong.

Weak: two prompts of eight samples for each GPU, so a GPU has as much to do at any size. Strong: as many prompts as the
weak run of 128 GPUs, at any size. Half of the GPUs train, each of the others is an engine replica. Efficiency is the
number of samples in a GPU's second, over that of the base: 32 GPUs (weak), 8 GPUs (strong).

The floors of a step follow from the inputs alone. The driver handles one sample after another. The longest response
decodes by itself, token by token; at ratio r it may take the time of 1 + r steps. The trainer computes at its
(imperfectly scaled) speed.

    python benchmarks/scaling.py --sizes 8 32 128 1024 --how weak
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.configs import derived
from roll.configs.loader import config_from_tree
from roll.configs.run import PipelineConfig
from roll.simulation.costs import Tokens, costs_of
from roll.simulation.inputs import Inputs, read_inputs
from roll.simulation.run import simulate
from roll.simulation.workload import response_lengths

SIZES = (8, 32, 128, 1024, 10_000)
RATIOS = (0.0, 1.0, 3.0)
PROMPTS_PER_GPU, GROUP, LONGEST, PROMPT, MEDIAN = 2, 8, 8192, 512, 1500
STRONG = 128
"""GPUs whose weak run has as many prompts as the strong ones."""
BASE = {"weak": 32, "strong": 8}
LARGE = 10_000
"""Prompts of a step from which on only four steps are measured."""


@dataclass(frozen=True)
class Row:
    """A size with its simulated steps."""

    gpus: int
    samples: int
    seconds: dict[tuple[float, bool], float]
    """(Ratio, streams) -> seconds of a step."""
    floors: dict[str, float]
    """Part -> seconds below which no step can be."""


def configuration(gpus: int, prompts: int, ratio: float, streams: bool) -> PipelineConfig:
    """Return a run of a 7B model, half of whose GPUs train."""
    return config_from_tree(
        {
            "pipeline": "rlvr",
            "pretrain": "Qwen/Qwen2.5-7B",
            "cluster": {"device": "cuda", "num_devices_per_node": 8, "num_nodes": gpus // 8},
            "max_steps": 100,
            "rollout_batch_size": prompts,
            "num_return_sequences_in_group": GROUP,
            "prompt_length": PROMPT,
            "response_length": LONGEST,
            "async_generation_ratio": ratio,
            "adv_estimator": "grpo",
            "actor_train": {
                "device_mapping": f"0-{gpus // 2 - 1}",
                "strategy_args": {"strategy_name": "fsdp2_train"},
                "stream_groups": streams,
                "data_args": {"file_name": "train.jsonl"},
            },
            "actor_infer": {
                "device_mapping": f"{gpus // 2}-{gpus - 1}",
                "model_args": {"dtype": "bfloat16"},
                "strategy_args": {"strategy_name": "vllm"},
            },
            "rewards": {"math": {"verifier": "exact"}},
        }
    )


def floors(config: PipelineConfig, inputs: Inputs) -> dict[str, float]:
    """Return the seconds of a step that each part takes by itself."""
    costs, samples = costs_of(config, inputs), derived.samples_per_step(config)
    drawn = response_lengths(inputs.lengths, LONGEST, (4096, GROUP), np.random.default_rng(0)) + PROMPT / 2
    tokens = Tokens(np.resize(drawn, samples))
    alone = costs.engine.step[1] + costs.engine.cached_token * (PROMPT + LONGEST / 2)
    return {
        "driver": samples * inputs.driver.sample_seconds,
        "longest response": LONGEST * alone,
        "trainer": costs.train(tokens) + costs.train_step + costs.gather,
    }


def measured(gpus: int, prompts: int, inputs: Inputs, ratios: Sequence[float]) -> Row:
    """Simulate a size."""
    seconds: dict[tuple[float, bool], float] = {}
    for streams in (False, True):
        for ratio in ratios:
            began = time.process_time()
            steps = 4 if prompts >= LARGE else 8
            outcome = simulate(configuration(gpus, prompts, ratio, streams), inputs, steps=steps)
            seconds[ratio, streams] = outcome.step_seconds
            idle = ", ".join(f"{role} {share:.0%}" for role, share in outcome.idle.items())
            what = f"{gpus} GPUs, ratio {ratio:g}{', streaming' if streams else ''}"
            took = f"simulated in {time.process_time() - began:.0f} s"
            print(f"# {what}: {outcome.step_seconds:.1f} s a step, idle {idle}; {took}", flush=True)
    return Row(gpus, prompts * GROUP, seconds, floors(configuration(gpus, prompts, 0, False), inputs))


def lines(rows: Sequence[Row], how: str) -> list[str]:
    """Return the table: each cell has the seconds of a step and the efficiency."""
    keys = list(rows[0].seconds)
    heads = [f"{'streaming, ' if streams else ''}ratio {ratio:g}" for ratio, streams in keys]
    table = [["GPUs", "samples", *heads, *rows[0].floors]]
    table.append(["---"] * len(table[0]))
    base = next((row for row in rows if row.gpus == BASE[how]), rows[0])
    for row in rows:
        done = [row.samples / row.gpus / row.seconds[key] for key in keys]
        before = [base.samples / base.gpus / base.seconds[key] for key in keys]
        cells = [
            f"{row.seconds[key]:.1f} s, {_share(now / then)}" for key, now, then in zip(keys, done, before, strict=True)
        ]
        table.append(
            [f"{row.gpus:,}", f"{row.samples:,}", *cells, *(f"{seconds:.1f} s" for seconds in row.floors.values())]
        )
    return [f"| {' | '.join(cells)} |" for cells in table]


def _share(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of GPUs, multiples of 8")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--how", choices=list(BASE), default="weak")
    parser.add_argument("--input", action="append", default=[], metavar="KEY=VALUE", help="an input of `roll simulate`")
    options = parser.parse_args()
    given = read_inputs(None, [f"lengths.median={MEDIAN}", f"lengths.prompt={PROMPT // 2}", *options.input])
    rows = []
    for gpus in options.sizes:
        prompts = PROMPTS_PER_GPU * (gpus if options.how == "weak" else STRONG)
        rows.append(measured(gpus, prompts, given, options.ratios))
    print("\n".join(lines(rows, options.how)))


if __name__ == "__main__":
    main()
