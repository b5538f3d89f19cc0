"""`roll serve MODEL`: serves a finished model to clients of OpenAI and Anthropic.

`roll chat` loads a model in the same way.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll.check.data import has_model, is_local, positions_of
from roll.cli.main import FAILURE, SUCCESS, command_parser, dotted_options
from roll.configs.errors import ConfigError, ConfigProblem, nearest_name_hint
from roll.configs.plugins import problem, require
from roll.configs.strategies import ENGINES, option_problems
from roll.tracking.files import say

if TYPE_CHECKING:
    from roll.agentic.endpoint.turns import TurnReader
    from roll.engines.local import ServedHere, Serving

LONGEST = 32768
"""Default limit of prompt plus answer in tokens; the model's own limit if that is lower."""
NAMES = {"hf": "hf_infer"}
"""Short names of engines."""
_EPILOG = """\
examples:
  roll serve output/quickstart/latest
  roll serve Qwen/Qwen2.5-0.5B-Instruct --engine vllm gpu_memory_utilization=0.8
  roll serve output/agent/latest --port 0 --temperature 0

MODEL is the folder of a run (its last checkpoint is served), of a checkpoint or of any model in Hugging Face format, or
a name on the model hub. Ctrl-C ends it.
exit codes: 0 it was ended; 2 what was asked for cannot be served, with a remedy; 1 anything else.
"""


def main(arguments: Sequence[str]) -> int:
    """Serve a model until Ctrl-C; return the exit code."""
    parser = command_parser("serve", "Serve a finished model to clients of OpenAI and Anthropic.", _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="folder of a run, a checkpoint or a model; or a hub name")
    add_model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default 8000; 0: any that is free)")
    parser.add_argument(
        "--api-key", help="key that requests must send; by default none at 127.0.0.1, and a new one at other addresses"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        key = options.api_key or ("" if is_loopback(options.host) else f"sk-{secrets.token_urlsafe(24)}")
        _require_free(options.host, options.port)
        what = served_here(options, host=options.host, port=options.port, key=key)
        with started(what) as served:
            say(f"{what.name} is served at {served.address}")
            say(f"  OPENAI_BASE_URL={served.address} OPENAI_API_KEY={key or 'none'}")
            say(f"  ANTHROPIC_BASE_URL={served.address.removesuffix('/v1')} ANTHROPIC_API_KEY={key or 'none'}")
            say(f"  roll chat --url {served.address}{f' --api-key {key}' if key else ''}\nCtrl-C ends it")
            wait([served.failed])
            say(f"the engine failed: {served.failed.result()}", error=True)
            return FAILURE
    except KeyboardInterrupt:
        say("ended")
        return SUCCESS


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the model and its sampling."""
    parser.add_argument("options", nargs="*", metavar="key=value", help="options of the engine, as `strategy_config`")
    parser.add_argument("--engine", default="hf", help="hf (default) or vllm")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs that the model is split over (default 1)")
    parser.add_argument("--dtype", help="precision; by default bfloat16 on a GPU, and float32 without one")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of a prompt and its answer at most")
    parser.add_argument("--temperature", type=float, default=1.0, help="where a request names none (default 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="where a request names none (default 1)")
    parser.add_argument("--top-k", type=int, default=0, help="where a request names none (default 0: all tokens)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, whatever a request asks for")
    parser.add_argument("--tool-parser", metavar="NAME", help="form of tool calls; by default by the chat template")
    parser.add_argument("--chat-template", metavar="FILE", help="used in place of the model's own")
    parser.add_argument(
        "--on-control-tokens",
        choices=("plain", "refuse"),
        default="plain",
        help="what becomes of messages that spell control tokens: text (default), or a refused request",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


@contextmanager
def started(what: ServedHere) -> Iterator[Serving]:
    """Serve a model while the context is open. SIGTERM ends it as Ctrl-C does, also in a background job of a shell."""
    from roll.engines.local import serving

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with ExitStack() as stack:
        try:
            served = stack.enter_context(serving(what))
        except RuntimeError as cause:
            raise problem("--port", str(cause), "take another port") from cause
        yield served


def served_here(options: argparse.Namespace, **where: Any) -> ServedHere:
    """Return the model to serve, and how, from the options of `add_model_options`. Raises `ConfigError`."""
    _check_numbers(options)
    name = NAMES.get(options.engine, options.engine)
    if name not in ENGINES.names() and ":" not in name:
        raise problem("--engine", f"there is no engine `{options.engine}`", nearest_name_hint(name, ENGINES.names()))
    if name == "hf_infer" and options.num_gpus > 1:
        raise problem("--num-gpus", "hf_infer splits no model over GPUs", "take `--engine vllm`")
    ENGINES.load(name, "--engine")
    require(("aiohttp",), "an endpoint", "MODEL", "agents")
    config = _engine_options(name, options.options)
    say("loading ...")
    model = model_at(options.model)
    import torch

    from roll.agentic.endpoint.served import ServedSampling
    from roll.engines.local import ServedHere
    from roll.engines.worker import EngineSpec

    reader = _reader(model, options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    positions, _ = positions_of(Path(model))
    spec = EngineSpec(
        name,
        config,
        model,
        options.dtype or ("bfloat16" if device == "cuda" else "float32"),
        "sdpa",
        options.trust_remote_code,
        options.sequence_length or min(positions or LONGEST, LONGEST),
        options.num_gpus,
    )
    sampling = ServedSampling(options.temperature, options.top_p, options.top_k, options.max_tokens)
    return ServedHere(spec, cast(Any, device), reader, sampling, options.model.rstrip("/") or "policy", **where)


def model_at(name: str) -> str:
    """Return the folder of a model: the last undamaged checkpoint of a run, or the folder itself.

    A hub name is returned unchanged. Raises `ConfigError`.
    """
    from roll.pipeline.checkpoints import checkpoint_folder, exported_steps, model_damage

    folder = Path(name)
    if not folder.is_dir():
        if is_local(name):
            raise problem("MODEL", f"there is no folder `{name}`", "name the folder of a run or of a model")
        return name
    if has_model(folder):
        damages = [model_damage(folder)]
        found = folder
    else:
        checkpoints = folder if folder.name == "checkpoints" else folder / "checkpoints"
        folders = [checkpoint_folder(checkpoints, step) for step in reversed(exported_steps(checkpoints))]
        if not folders:
            what = "a run without a checkpoint" if checkpoints.is_dir() else "neither a model nor a run"
            raise problem("MODEL", f"`{name}` is {what}", "name a folder with `checkpoints/step-<n>`, or of a model")
        damages = []
        for found in folders:
            damages.append(model_damage(found))
            if damages[-1] is None:
                break
            say(f"passed over: {damages[-1]}", error=True)
    if damages[-1] is not None:
        raise problem("MODEL", damages[-1], "name another folder: this one was not written to its end")
    if not (found / "config.json").is_file():
        raise problem("MODEL", f"{found} is a model of pictures", "name a model of text")
    return str(found)


def _reader(model: str, options: argparse.Namespace) -> TurnReader:
    from roll.agentic.endpoint.tool_calls import PARSERS, parser_for
    from roll.agentic.endpoint.turns import TurnReader
    from roll.data.chat import ChatTurns
    from roll.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model, trust_remote_code=options.trust_remote_code, config_path="MODEL")
    if options.chat_template is not None:
        try:
            tokenizer.chat_template = Path(options.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as cause:
            raise problem("--chat-template", f"it cannot be read: {cause}", "name a file of text") from cause
    if not tokenizer.chat_template:
        remedy = "name one (`--chat-template FILE`), or take an instruction-tuned model"
        raise problem("MODEL", f"the tokenizer of {model} has no chat template", remedy)
    parser = options.tool_parser or parser_for(tokenizer.get_chat_template())
    if parser is None:
        say("how the chat template writes tool calls is not known: they stay text; --tool-parser names their form")
        parser = "none"
    if parser not in PARSERS:
        raise problem("--tool-parser", f"there is no parser {parser!r}", nearest_name_hint(parser, PARSERS))
    refuses = options.on_control_tokens == "refuse"
    return TurnReader(ChatTurns(tokenizer, refuse_control_tokens=refuses), tokenizer, PARSERS[parser])


def _engine_options(name: str, given: Sequence[str]) -> dict[str, Any]:
    config = dotted_options(given, "option of the engine")
    if problems := option_problems(ENGINES, name, config, "key=value"):
        raise ConfigError(problems)
    return config


def _check_numbers(options: argparse.Namespace) -> None:
    fits = {
        "--temperature": options.temperature >= 0,
        "--top-p": 0 < options.top_p <= 1,
        "--top-k": options.top_k >= 0,
        "--max-tokens": options.max_tokens is None or options.max_tokens >= 1,
        "--sequence-length": options.sequence_length is None or options.sequence_length >= 2,
        "--num-gpus": options.num_gpus >= 1,
    }
    wrong = [name for name, is_right in fits.items() if not is_right]
    if wrong:
        raise ConfigError([ConfigProblem(name, "its number is out of range", "see `--help`") for name in wrong])


def is_loopback(host: str | None) -> bool:
    """Return True for a name of this machine that no other machine can reach."""
    return host in ("127.0.0.1", "localhost", "::1")


def _require_free(host: str, port: int) -> None:
    """Raise `ConfigError` if the server could not listen at the address, before the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as cause:
        remedy = "take another port (`--port 0`: any that is free), or an address of this machine"
        raise problem("--port", f"cannot listen at {host}:{port}: {cause}", remedy) from cause
