"""Compare the memory of log-probabilities and entropies of a large vocabulary: the plain way against the product's.

Both start from hidden states and run forward and backward. The plain way makes float32 logits, their log-softmax and
the entropies from it, and lets autograd compute the gradients. Each side runs in a process of its own. Its peak is the
most memory that the process ever held, less the memory before the first pass (inputs, libraries). The loss multiplies
each log-probability by a random number; the entropy is a metric without a gradient, or with `--entropy-gradient` a part
of the loss. Times are medians over the repetitions. Differences are the largest over all elements; for gradients, as
shares of the largest element. Prints one JSON line.

    python benchmarks/logprob_memory.py [--rows 4] [--length 1024] [--vocabulary 150000] [--hidden 256] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from roll.algorithms.logprobs import LINEAR_CHUNK_ELEMENTS, EntropyUse, linear_results

MIB = 2**20
GRADIENTS = ("hidden_gradient", "weight_gradient")


def plain_way(
    hidden: Tensor, weight: Tensor, targets: Tensor, entropy_gradient: bool, chunk_elements: int
) -> tuple[Tensor, Tensor]:
    """Compute both in the simplest way, without chunks."""
    table = functional.linear(hidden, weight).float().log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient):
        entropy = -(table.exp() * table).sum(-1)
    return table.gather(-1, targets[..., None])[..., 0], entropy


def product_way(
    hidden: Tensor, weight: Tensor, targets: Tensor, entropy_gradient: bool, chunk_elements: int
) -> tuple[Tensor, Tensor]:
    """Compute both as the trainer does."""
    use: EntropyUse = "loss" if entropy_gradient else "metric"
    logprobs, entropy = linear_results(hidden, weight, None, targets, 1.0, use, chunk_elements)
    return logprobs, entropy


SIDES = {"plain": plain_way, "roll": product_way}


def one_pass(side: str, inputs: dict[str, Tensor], entropy_gradient: bool, chunk_elements: int) -> dict[str, Tensor]:
    """Run forward and backward; return values and gradients."""
    hidden, weight = (inputs[name].detach().requires_grad_() for name in ("hidden", "weight"))
    logprobs, entropy = SIDES[side](hidden, weight, inputs["targets"], entropy_gradient, chunk_elements)
    loss = (logprobs * inputs["advantages"]).sum()
    (loss - 0.1 * entropy.sum() if entropy_gradient else loss).backward()
    values = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    return values | dict(zip(GRADIENTS, (hidden.grad, weight.grad), strict=True))


def make_inputs(rows: int, length: int, vocabulary: int, size: int) -> dict[str, Tensor]:
    """Make random inputs whose logits have a standard deviation of 2."""
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(rows, length, size, generator=generator),
        "weight": torch.randn(vocabulary, size, generator=generator) * 2 / size**0.5,
        "targets": torch.randint(vocabulary, (rows, length), generator=generator),
        "advantages": torch.randn(rows, length, generator=generator),
    }


def run_side(side: str, arguments: argparse.Namespace, folder: str) -> None:
    """Measure in this process; leave figures and results in the folder."""
    torch.set_num_threads(arguments.threads)
    chunk = arguments.chunk_elements
    one_pass(side, make_inputs(1, 4, 64, 16), arguments.entropy_gradient, chunk)
    inputs = make_inputs(arguments.rows, arguments.length, arguments.vocabulary, arguments.hidden)
    before = resident_bytes()
    seconds = []
    for _ in range(arguments.repeats):
        results: dict[str, Tensor] = {}  # Results of the last pass would count as memory of the next.
        started = time.perf_counter()
        results = one_pass(side, inputs, arguments.entropy_gradient, chunk)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    figures = {"peak_mib": round(peak / MIB), "seconds": round(statistics.median(seconds), 2)}
    (Path(folder) / f"{side}.json").write_text(json.dumps(figures))
    save_file(results, Path(folder) / f"{side}.safetensors")


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmRSS; this benchmark needs Linux")


def compare_sides(figures: dict[str, dict[str, float]], results: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Return peaks and times with their ratios (ours divided by the plain one's), and the largest differences."""
    differences = {}
    for name, plain in results["plain"].items():
        difference = (results["roll"][name] - plain).abs().max().item()
        scale = plain.abs().max().item() if name in GRADIENTS else 1.0
        differences[name] = float(f"{difference / scale:.1e}")
    compared: dict[str, Any] = {}
    for unit in ("peak_mib", "seconds"):
        ours, theirs = figures["roll"][unit], figures["plain"][unit]
        compared[unit] = {"plain": theirs, "roll": ours, "ratio": round(ours / theirs, 3)}
    return {**compared, "largest_difference": differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens of each row")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=256, help="size of the hidden states")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk-elements", type=int, default=LINEAR_CHUNK_ELEMENTS, help="logits at a time, ours")
    parser.add_argument("--entropy-gradient", action="store_true", help="train on the entropy too")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            process = context.Process(target=run_side, args=(side, arguments, folder))
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"the side {side!r} ended with code {process.exitcode}; is the memory large enough?")
        figures = {side: json.loads((Path(folder) / f"{side}.json").read_text()) for side in SIDES}
        results = {side: load_file(Path(folder) / f"{side}.safetensors") for side in SIDES}
        compared = compare_sides(figures, results)
    print(json.dumps({"benchmark": "logprob_memory", **vars(arguments), **compared}))


if __name__ == "__main__":
    main()
