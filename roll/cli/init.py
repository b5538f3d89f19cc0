"""`roll init FILE`: writes a working configuration from a few answers, or from flags alone.

The command loads and checks the file it has written, and removes it again if it cannot work. Anything still missing
(the prompts, GPUs, a user's own function) is named, so `roll check` reports nothing new. The file has few keys, in the
order in which a reader needs them, and comments with reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from roll.check.config import check_elsewhere
from roll.check.data import positions_of
from roll.check.plan import missing_packages
from roll.cli.main import BAD_CONFIGURATION, FAILURE, SUCCESS, command_parser
from roll.configs.errors import ConfigError, problems_of
from roll.configs.loader import load_config
from roll.configs.run import RunConfig

_EPILOG = """\
examples:
  roll init my_run.yaml
  roll init my_run.yaml --model Qwen/Qwen2.5-7B --data data/train.jsonl --devices 8 --async
  roll init my_run.yaml --model my_model --data data/train.jsonl --device cpu --verifier exact --yes

Without --yes, what no flag says is asked for.
"""


QUESTIONS = {
    "model": ("model: a folder, or a hub name", "Qwen/Qwen2.5-0.5B-Instruct"),
    "data": ("prompts: a JSONL file (`prompt`, `ground_truth`, `domain`)", "data/train.jsonl"),
    "domain": ("domain of these prompts", "math"),
    "verifier": ("verifier: math, exact, numeric, code, or my_module:my_function", "math"),
    "device": ("devices: cuda or cpu", "cuda"),
    "devices": ("how many of them", "2"),
}
"""Flag -> question to the user, and the default answer."""
LONGEST = 512 + 1024
"""Tokens of prompt plus response, a third of them for the prompt; fewer if the model has fewer positions."""

_TEMPLATE = """\
# roll check {path}
# roll train {path}
pipeline: rlvr
exp_name: {name}
pretrain: {model}

cluster: {{device: {device}, num_devices_per_node: {devices}}}

# 32 prompts x 8 samples = 256 samples a step. Lengths are in tokens.
max_steps: 100
rollout_batch_size: 32
num_return_sequences_in_group: 8
prompt_length: {prompt_length}
response_length: {response_length}

# {ratio_reason}
async_generation_ratio: {ratio}

actor_train:
  device_mapping: {trainers}
  model_args: {{dtype: {dtype}}}
  training_args: {{learning_rate: 1.0e-6, warmup_steps: 5}}
  data_args:
    file_name: {data}
    template: {template}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {{gradient_checkpointing: true}}
actor_infer:
  device_mapping: {engines}
  model_args: {{dtype: {dtype}}}
  strategy_args: {{strategy_name: {engine}}}

# How responses are judged: the key is a name, the tags are the `domain` of prompts.
rewards:
  {domain}: {{verifier: {verifier}, tag_included: [{domain}]}}
"""


def main(arguments: Sequence[str], ask: Callable[[str], str] = input) -> int:
    """Ask for settings, write the configuration and check it; return the exit code."""
    parser = command_parser("init", "Write a working configuration for prompts with checkable answers.", _EPILOG)
    parser.add_argument("file", metavar="FILE", help="YAML file to write; it must not be there yet")
    for flag, (text, default) in QUESTIONS.items():
        parser.add_argument(f"--{flag}", help=f"{text} (default {default})")
    parser.add_argument(
        "--async", dest="overlapped", action="store_true", help="generate one step ahead, on devices of its own"
    )
    parser.add_argument("--yes", action="store_true", help="ask nothing; take the defaults")
    options = parser.parse_args(arguments)
    path = Path(options.file)
    if path.exists():
        print(f"{path} is there already; name another file, or remove it", file=sys.stderr)
        return FAILURE
    try:
        text = _text(path, _answers(options, ask), overlapped=options.overlapped)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        config = load_config(path)
        missing = [*check_elsewhere(config), *problems_of(partial(_look_up, config))]
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        path.unlink(missing_ok=True)
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return FAILURE
    except EOFError:
        print("there is no terminal to ask in; give flags and --yes", file=sys.stderr)
        return BAD_CONFIGURATION
    except ConfigError as error:
        path.unlink(missing_ok=True)
        print("\n\n".join(["these answers cannot work", *map(str, error.problems)]), file=sys.stderr)
        return BAD_CONFIGURATION
    print(f"written: {path}")
    for problem in missing:
        print(f"still needed: {problem.path}: {problem.message}")
    print(f"next: roll check {path}")
    return SUCCESS


def _look_up(config: RunConfig) -> None:
    """Raise `ConfigError` for names that cannot be found here, such as a module of the user's own."""
    from roll.pipeline.preflight import look_up

    look_up(config, with_model=False, without=missing_packages(config))


def _answers(options: argparse.Namespace, ask: Callable[[str], str]) -> dict[str, str]:
    answers = {}
    for flag, (text, default) in QUESTIONS.items():
        answer = vars(options)[flag]
        if answer is None and not options.yes:
            answer = ask(f"{text} [{default}]: ").strip() or None
        answers[flag] = default if answer is None else answer
    return answers


def _text(path: Path, answers: dict[str, str], *, overlapped: bool) -> str:
    """Return the configuration as YAML. Impossible answers are written as they are; the checks report them."""
    quoted = {name: json.dumps(answer, ensure_ascii=False) for name, answer in answers.items()}
    devices = int(answers["devices"]) if answers["devices"].isdecimal() else 0
    trainers, engines = _shares(devices, overlapped)
    gpus = answers["device"] != "cpu"
    positions, _ = positions_of(Path(answers["model"]))
    longest = min(LONGEST, positions or LONGEST)
    if overlapped:
        ratio_reason = "Generation runs one training step ahead, so both work all the time; 0 takes turns."
    else:
        ratio_reason = "Generation and training take turns on the same devices; 1 generates a step ahead, on its own."
    return _TEMPLATE.format(
        path=path,
        name=json.dumps(path.stem, ensure_ascii=False),
        model=quoted["model"],
        device=quoted["device"],
        devices=devices or quoted["devices"],
        prompt_length=longest // 3,
        response_length=longest - longest // 3,
        ratio=int(overlapped),
        ratio_reason=ratio_reason,
        trainers=trainers,
        engines=engines,
        dtype="bfloat16" if gpus else "float32",
        data=quoted["data"],
        template="chat" if "instruct" in answers["model"].lower() or "qwen3" in answers["model"].lower() else "raw",
        engine="vllm" if gpus else "hf_infer",
        domain=quoted["domain"],
        verifier=quoted["verifier"],
    )


def _shares(devices: int, overlapped: bool) -> tuple[str, str]:
    """Return the device mappings of trainer and engine: one half each, or all devices for both."""
    if not overlapped:
        return (f'"0-{max(0, devices - 1)}"',) * 2
    half = max(1, devices // 2)
    return f'"0-{half - 1}"', f'"{half}-{max(half, devices - 1)}"'
