"""Checks of `roll doctor --gpu`, each in a process of its own.

Most checks are short training runs with a configuration that forces one code path: a weight transport, an engine over
two devices, a killed engine. The run itself verifies every weight update (checksums, parity check); the check evaluates
the files of the run. Two checks drive an engine directly, and compare its log-probabilities with those of transformers
on a CPU. Models are tiny, except for an embedding that is larger than any transfer buffer. They are generated here, and
nothing is downloaded.

Without a GPU the same code runs on CPU slots. Where a path needs CUDA, it runs with another engine, or only as far as
the trainer's part.

    python -m roll.doctor.gpu_checks NAME FOLDER DEVICE GPUS
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import numpy as np

from roll.check.config import check_config, read_config
from roll.check.memory import estimate_memory
from roll.check.memory_parts import GIB
from roll.tracking.summary import describe_error, read_summary
from roll.tracking.trackers import read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.engines.base import InferStrategy

Figures = dict[str, float | int | str]
VOCABULARY = 152_064
"""Vocabulary size of Qwen2.5. Its embedding has 311 MB, more than the 256 MiB of a bucket or vLLM's packed buffer."""
SMALL_VOCABULARY = 512
LONGEST = 64
STEPS = 2
"""Training steps of a run, which publishes three versions."""
ESTIMATE_EXCEEDED = {"cuda": 1.1, "cpu": 1.25}
"""Device -> ratio of measured to estimated memory above which an estimate is too low. Libraries on hosts vary."""
FAR_ENOUGH = 4.0
"""Factor by which an updated engine's log-probabilities must be nearer to the new weights than to the old ones."""
_LAST_LINES = 4_000
"""Characters at the end of a failed run's output that are reported as the reason."""


class NotHere(Exception):
    """The check needs something that this machine does not have."""


@dataclass(frozen=True)
class Bench:
    """Folder and devices of a check."""

    folder: Path
    device: Literal["cpu", "cuda"]
    gpus: int

    @property
    def on_gpu(self) -> bool:
        """True if GPUs are used."""
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """Precision of engines."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def apart(self) -> bool:
        """True if trainer and engine can have devices of their own."""
        return not self.on_gpu or self.gpus > 1

    def need(self, gpus: int, *modules: str) -> None:
        """Raise `NotHere` if a module is not installed, or if GPUs are used and fewer than ``gpus`` are here."""
        if self.on_gpu and self.gpus < gpus:
            raise NotHere(f"needs {gpus} GPUs, {self.gpus} here")
        for module in modules:
            if find_spec(module) is None:
                raise NotHere(f"{module} is not installed")

    def engine(self) -> tuple[str, dict[str, Any]]:
        """Return the engine to test, and its options: vLLM if it is installed, else `hf_infer`."""
        if find_spec("vllm") is None:
            return "hf_infer", {}
        return "vllm", {"max_num_seqs": 16} | ({"gpu_memory_utilization": 0.3} if self.on_gpu else {})


def parity(response: str) -> float:
    """Score a response with a pseudo-random 0 or 1, so that samples differ."""
    return float(crc32(response.encode()) % 2)


def make_model(folder: Path, vocabulary: int, hidden: int) -> str:
    """Write a random Qwen2 model, its tokenizer (one word per token) and its prompts; return the model's folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**_sizes(vocabulary, hidden), tie_word_embeddings=True))
    words = {"<pad>": 0, "<eos>": 1} | {f"w{token}": token for token in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = folder / "model"
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    prompts = ({"prompt": f"w{2 + index} w{3 + index} w{5 + 7 * index}", "domain": "doctor"} for index in range(32))
    (folder / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


def make_experts() -> PreTrainedModel:
    """Return a random mixture of experts, with one dense layer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = dict(moe_intermediate_size=64, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)
    sizes = _sizes(SMALL_VOCABULARY, 128)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, mlp_only_layers=[1], head_dim=32)).eval()


def _sizes(vocabulary: int, hidden: int) -> dict[str, Any]:
    return dict(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1 if hidden < 512 else 0.02,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )


def configuration(bench: Bench, changes: dict[str, Any], *, large: bool = True) -> dict[str, Any]:
    """Return the configuration of a short run; ``changes`` are dotted keys. ``large``: with the large embedding."""
    hidden = (1024 if bench.on_gpu else 512) if large else 128
    model = make_model(bench.folder, VOCABULARY if large else SMALL_VOCABULARY, hidden)
    config: dict[str, Any] = {
        "pipeline": "rlvr",
        "exp_name": "doctor",
        "seed": 7,
        "pretrain": model,
        "output_dir": str(bench.folder / "run"),
        "cluster": {"device": bench.device, "num_devices_per_node": 2 if bench.apart else 1},
        "max_steps": STEPS,
        "rollout_batch_size": 2,
        "num_return_sequences_in_group": 4,
        "prompt_length": 8,
        "response_length": 16,
        "async_generation_ratio": 1 if bench.apart else 0,
        "track_with": [],
        "actor_train": {
            "device_mapping": [0],
            "model_args": {"dtype": bench.dtype},
            "training_args": {"learning_rate": 1e-3},
            "data_args": {"file_name": str(bench.folder / "train.jsonl")},
        },
        "actor_infer": {
            "device_mapping": [1 if bench.apart else 0],
            "model_args": {"dtype": bench.dtype},
            "strategy_args": {"strategy_name": "hf_infer"},
        },
        "rewards": {"doctor": {"verifier": "roll.doctor.gpu_checks:parity"}},
        "weight_update": {"canary_interval": 1},
    }
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return config


def run(bench: Bench, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a configuration in a process of its own. Return the metrics of its steps.

    Raises ``RuntimeError`` with the run's own error if it fails.
    """
    path = bench.folder / "run.yaml"
    path.write_text(json.dumps(config))  # which is YAML too
    command = [sys.executable, "-m", "roll.cli.main", "train", str(path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(ended.stdout)
    if ended.returncode != 0:
        summary = bench.folder / "run" / "summary.json"
        cause = read_summary(summary).get("error") if summary.is_file() else None
        raise RuntimeError(str(cause or ended.stdout[-_LAST_LINES:].strip()))
    return [step for step in read_metrics(bench.folder / "run" / "metrics.jsonl") if step["step"] > 0]


def figures_of(steps: Sequence[dict[str, Any]]) -> Figures:
    """Return the figures of a run's weight updates, memory and utilisation, each the median over its steps."""
    names = [f"weights/{name}_seconds" for name in ("gather", "send", "fetch", "load", "stall")]
    names += ["weights/bytes", "mismatch/canary_abs_mean", "mismatch/canary_max", "time/step"]
    names += sorted({name for step in steps for name in step if name.startswith(("memory/", "mfu/"))})
    known = {name: [step[name] for step in steps if step.get(name) is not None] for name in names}
    return {name: float(f"{median(values):.4g}") for name, values in known.items() if values}


def transport(name: str) -> Callable[[Bench], Figures]:
    """Return the check of a transport through memory or files."""

    def check(bench: Bench) -> Figures:
        return figures_of(run(bench, configuration(bench, {"weight_update.transport": name})))

    return check


def pushed(name: Literal["nccl", "cuda_ipc"]) -> Callable[[Bench], Figures]:
    """Return the check of a transport that vLLM implements. On a CPU only the trainer's copy is made and compared."""

    def check(bench: Bench) -> Figures:
        if not bench.on_gpu:
            return _gathered(bench, name)
        bench.need(2 if name == "nccl" else 1, "vllm")
        engine, options = bench.engine()
        changes: dict[str, Any] = {
            "weight_update.transport": name,
            "actor_infer.strategy_args": {
                "strategy_name": engine,
                "strategy_config": options | {"enforce_eager": True},
            },
        }
        if name == "cuda_ipc":
            changes |= {"actor_infer.device_mapping": [0], "async_generation_ratio": 0}
        return figures_of(run(bench, configuration(bench, changes)))

    return check


def _gathered(bench: Bench, name: str) -> Figures:
    """Copy a model as the trainer's first rank does before a push, and compare the copy tensor by tensor."""
    import torch
    from transformers import AutoModelForCausalLM

    from roll.weights.buckets import tensor_checksum
    from roll.weights.checkpoint_names import CheckpointNames
    from roll.weights.publisher import PushPublisher
    from roll.weights.transports import TransportSpec

    model = AutoModelForCausalLM.from_pretrained(make_model(bench.folder, VOCABULARY, 1024))
    spec = TransportSpec(name, 1, bench.folder)
    publisher = PushPublisher(spec, 0, "127.0.0.1", export=lambda memory: ("cpu", (memory.data_ptr(),)))
    weights = list(CheckpointNames.like(model).of(model.named_parameters()))
    for version in (1, 2):
        publisher.gather(version, 0, weights, torch.bfloat16, spec.bucket_bytes)
        publication = publisher.send(version)
    wanted = {each: tensor_checksum(tensor.detach().to(torch.bfloat16)) for each, tensor in weights}
    differing = sorted(each for each in wanted if publication.checksums.get(each) != wanted[each])
    if differing or publication.checksums.keys() != wanted.keys():
        raise RuntimeError(f"the copy differs: {differing[:3] or sorted(publication.checksums.keys() ^ wanted.keys())}")
    figures: Figures = {f"{each}_seconds": round(seconds, 4) for each, seconds in publication.seconds.items()}
    return figures | {"bytes": publication.total_bytes, "chunks": len(publisher.offer(2))}


def two_devices(bench: Bench) -> Figures:
    """Run two ranks of the trainer, and an engine over two GPUs. On a CPU run only the ranks, with gloo."""
    bench.need(2, *(("vllm",) if bench.on_gpu else ()))
    changes: dict[str, Any] = {
        "cluster.num_devices_per_node": 2 if bench.on_gpu else 3,
        "actor_train.device_mapping": [0, 1],
        "actor_infer.device_mapping": [2],
    }
    if bench.on_gpu:
        engine, options = bench.engine()
        changes |= {
            "actor_infer.device_mapping": [0, 1],
            "actor_infer.num_gpus_per_engine": 2,
            "actor_infer.strategy_args": {
                "strategy_name": engine,
                "strategy_config": options | {"enforce_eager": True},
            },
            "async_generation_ratio": 0,
        }
    return figures_of(run(bench, configuration(bench, changes, large=False)))


def killed_engine(bench: Bench) -> Figures:
    """Kill the engine's process after the first step. A new process must take its place with the same weights."""
    engine, options = bench.engine()
    changes: dict[str, Any] = {
        "chaos": {"enabled": True, "events": [{"kind": "kill", "role": "actor_infer", "at_step": 1}]},
        "actor_infer.strategy_args": {"strategy_name": engine, "strategy_config": options},
        "max_steps": 2 * STEPS,
    }
    steps = run(bench, configuration(bench, changes, large=False))
    restarts = steps[-1].get("engine/restarts")
    if restarts != 1:
        raise RuntimeError(f"{restarts} engines were replaced, not 1")
    return figures_of(steps) | {"engine/reissued": steps[-1]["engine/reissued"], "engine": engine}


def memory(bench: Bench) -> Figures:
    """Compare the memory that `roll check` estimates for trainer and engine with the measured memory."""
    response = 240 if bench.on_gpu else 48
    config = configuration(bench, {"response_length": response, "async_generation_ratio": 0})
    estimate = estimate_memory(check_config(read_config(config)))
    steps = run(bench, config)
    figures: Figures = {}
    for role in estimate.roles:
        name = f"memory/{role.role}/peak_gib"
        taken = [step[name] for step in steps if name in step]
        # On GPUs torch counts tensors only, without the driver's memory.
        driver = sum(part.size for part in role.always if part.name == "driver")
        estimated = (role.peak - driver if bench.on_gpu else role.peak + role.host_bytes) / GIB
        if taken:
            figures |= {f"{role.role}/estimated_gib": round(estimated, 3), f"{role.role}/measured_gib": max(taken)}
            if max(taken) > ESTIMATE_EXCEEDED[bench.device] * estimated:
                raise RuntimeError(f"{role.role} took {max(taken):.2f} GiB, and {estimated:.2f} were estimated")
    if not figures:
        raise RuntimeError("the run did not tell what memory it took")
    return figures


def experts(bench: Bench) -> Figures:
    """Update expert matrices, routers and then all weights; compare the engine with transformers each time."""
    model = make_experts()
    path = bench.folder / "experts"
    model.save_pretrained(path)
    kinds = (r"experts\.gate_up_proj", r"experts\.down_proj", r"mlp\.gate\.weight", r".")

    async def check(engine: InferStrategy) -> Figures:
        changed, figures = model, Figures()
        for version, pattern in enumerate(kinds, 1):
            before, changed = changed, _altered(changed, pattern, seed=version)
            await _update(engine, changed, version, bench)
            near, far = await _distances(engine, changed, before)
            figures |= {f"{version}/distance": round(near, 5), f"{version}/distance_to_old": round(far, 3)}
            if not near * FAR_ENOUGH < far:
                raise RuntimeError(
                    f"after an update of {pattern!r} the engine is {near:.3g} nats per token away from the new "
                    f"weights, and {far:.3g} from the old ones"
                )
        return figures

    return _with_engine(bench, str(path), check, shares_devices=False)


def sleep_and_wake(bench: Bench) -> Figures:
    """Let the engine sleep and wake with requests in flight, first keeping, then discarding its weights.

    Its log-probabilities are compared before and after.
    """
    path = make_model(bench.folder, SMALL_VOCABULARY, 128)

    async def check(engine: InferStrategy) -> Figures:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path).eval()
        other = _altered(model, ".", seed=1)
        figures, used = Figures(), await _scores(engine)
        for discard in (False, True):
            requests = [asyncio.create_task(_sampled(engine, index)) for index in range(4)]
            await asyncio.sleep(0.2)
            await engine.pause("resume")
            full = _free_bytes(bench)
            started = time.perf_counter()
            dropped = await engine.sleep(discard)
            asleep = time.perf_counter()
            freed = _free_bytes(bench) - full
            await engine.wake()
            awake = time.perf_counter()
            if dropped:
                await _prepare(engine, other, 1, bench)
                await engine.load_weights(1)
            await engine.resume()
            if any(tokens != LONGEST - 4 for tokens in await asyncio.gather(*requests)):
                raise RuntimeError("a request lost tokens while the engine slept")
            figures |= {
                f"discard={discard}/sleep_seconds": round(asleep - started, 3),
                f"discard={discard}/wake_seconds": round(awake - asleep, 3),
                f"discard={discard}/freed_gib": round(freed / GIB, 3),
            }
            if bench.on_gpu and freed <= 0:
                raise RuntimeError("the engine slept, and no memory of the GPU became free")
            if not dropped and not discard:
                again = await _scores(engine)
                worst = max(float(np.abs(a - b).max()) for a, b in zip(used, again, strict=True))
                if worst > 1e-3:
                    raise RuntimeError(f"after a sleep the engine computes other values, by up to {worst:.3g} nats")
        if not dropped:
            await _update(engine, other, 1, bench)
        near, far = await _distances(engine, other, model)
        if not near * FAR_ENOUGH < far:
            raise RuntimeError(f"after sleep and update: {near:.3g} nats from the new weights, {far:.3g} from the old")
        return figures | {"distance": round(near, 5), "distance_to_old": round(far, 3)}

    return _with_engine(bench, path, check, shares_devices=True)


def _with_engine(bench: Bench, path: str, check: Callable[[InferStrategy], Any], *, shares_devices: bool) -> Figures:
    """Run a check on an engine in this process."""
    from roll.engines.local import running_engine
    from roll.engines.worker import EngineSpec

    name, options = bench.engine()
    spec = EngineSpec(name, options, path, bench.dtype, "sdpa", False, LONGEST, shares_devices=shares_devices)

    async def checked() -> Figures:
        async with running_engine(spec, bench.device, "engine") as engine:
            figures: Figures = await check(engine)
            return figures | {"engine": name}

    return asyncio.run(checked())


def _altered(model: PreTrainedModel, pattern: str, seed: int) -> PreTrainedModel:
    """Return a copy of a model with other values in the parameters whose names match ``pattern``."""
    import torch

    torch.manual_seed(seed)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if re.search(pattern, name) and "norm" not in name:
                parameter.mul_(-1).add_(torch.randn_like(parameter) * 0.1)
    return changed


async def _update(engine: InferStrategy, model: PreTrainedModel, version: int, bench: Bench) -> None:
    """Load a model's weights into the engine as a run does, and compare checksums."""
    from roll.weights.publisher import Publication, check_weights

    sent = await _prepare(engine, model, version, bench)
    await engine.pause("keep")
    held = await engine.load_weights(version)
    await engine.resume()
    check_weights("the engine", Publication(version, [], sent[0], sent[1], 0), held)


async def _prepare(
    engine: InferStrategy, model: PreTrainedModel, version: int, bench: Bench
) -> tuple[int, dict[str, int]]:
    import torch

    from roll.weights.buckets import manifest, pack_buckets
    from roll.weights.checkpoint_names import CheckpointNames

    weights = CheckpointNames.like(model).of(model.named_parameters())
    buckets = list(pack_buckets(weights, 1 << 20, float_dtype=getattr(torch, bench.dtype)))
    await engine.prepare_weights(buckets, version)
    return manifest(buckets)


_SEQUENCES = [np.random.default_rng(seed).integers(2, SMALL_VOCABULARY, 48).astype(np.int32) for seed in range(4)]


async def _scores(engine: InferStrategy) -> list[np.ndarray]:
    return [scores[1:] for scores in await engine.score(_SEQUENCES)]


async def _distances(engine: InferStrategy, *models: PreTrainedModel) -> list[float]:
    """Return the mean absolute difference between the engine's log-probabilities and each model's, in nats."""
    import torch

    scores = np.concatenate(await _scores(engine))
    distances = []
    for model in models:
        with torch.no_grad():
            tokens = torch.from_numpy(np.stack(_SEQUENCES).astype(np.int64))
            logprobs = model(tokens).logits[:, :-1].float().log_softmax(-1)
            own = logprobs.gather(2, tokens[:, 1:, None])[..., 0].flatten().numpy()
        distances.append(float(np.abs(scores - own).mean()))
    return distances


async def _sampled(engine: InferStrategy, seed: int) -> int:
    """Return the number of tokens of a request that runs to its limit."""
    from roll.engines.base import GenerateRequest, SamplingParams

    sampling = SamplingParams(LONGEST - 4, seed=seed, ignore_eos=True)
    prompt = np.array([5, 6, 7], dtype=np.int32)
    return len((await engine.generate(GenerateRequest(f"asleep {time.time_ns()} {seed}", prompt, sampling))).token_ids)


def _free_bytes(bench: Bench) -> int:
    """Return the free memory of the GPU in bytes; 0 on a CPU."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if bench.on_gpu else 0


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    on_gpus: str
    """Description of the check with GPUs."""
    here: str
    """Description of its part for CPUs."""
    run: Callable[[Bench], Figures]


_LARGE = "a run whose embedding of 311 MB travels"
CHECKS: dict[str, Check] = {
    "shared_memory": Check(
        f"{_LARGE} through the host's memory, canaries at each version", "the same", transport("shared_memory")
    ),
    "object_store": Check(
        f"{_LARGE} through Ray's store, canaries at each version", "the same", transport("object_store")
    ),
    "checkpoint": Check(f"{_LARGE} through files, canaries at each version", "the same", transport("checkpoint")),
    "nccl": Check(
        f"{_LARGE} from the trainer's GPU to vLLM's", "the trainer's copy, every tensor compared", pushed("nccl")
    ),
    "cuda_ipc": Check(
        f"{_LARGE} within one GPU that trainer and vLLM share in turn",
        "the trainer's copy in chunks, every tensor compared",
        pushed("cuda_ipc"),
    ),
    "two_devices": Check(
        "two ranks of the trainer (NCCL), and vLLM over the same two GPUs", "two ranks (gloo)", two_devices
    ),
    "experts": Check(
        "updates of a mixture of experts, kind by kind, compared with transformers token by token", "the same", experts
    ),
    "sleep_and_wake": Check(
        "sleep with requests under way, memory freed, wake, also without the weights; compared token by token",
        "the same, without memory",
        sleep_and_wake,
    ),
    "killed_engine": Check(
        "a run whose engine is killed, and replaced with the same weights", "the same", killed_engine
    ),
    "memory": Check(
        "what `roll check` estimates for trainer and engine against what torch counted",
        "the same against the memory of the processes",
        memory,
    ),
}
"""Checks by name, in the order of the table."""


def main(arguments: Sequence[str]) -> int:
    """Run one check and write `result.json` into its folder."""
    name, folder, device, gpus = arguments
    bench = Bench(Path(folder), "cuda" if device == "cuda" else "cpu", int(gpus))
    code, said = 0, dict[str, Any]()
    try:
        said["figures"] = CHECKS[name].run(bench)
    except NotHere as reason:
        said["not_here"] = str(reason)
    except Exception as error:
        said["failed"], code = describe_error(error), 1
    (bench.folder / "result.json").write_text(json.dumps(said))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
