"""What SGLang's scheduler process does, step by step: prompts and caches, sampling, pauses, weights, memory."""

from __future__ import annotations

import copy
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from sglang.srt.server_args import ServerArgs

FUSED = {
    r"\.[qkv]_proj\.": ".qkv_proj.",
    r"\.(gate|up)_proj\.": ".gate_up_proj.",
    r"\.experts\.gate_up_proj$": ".experts.w13_weight",
    r"\.experts\.down_proj$": ".experts.w2_weight",
}


@dataclass
class Req:
    """A request inside the scheduler."""

    rid: str
    input_ids: list[int]
    params: dict[str, Any]
    salt: str | None
    masked: bool
    logprob_start: int
    routed: bool = False
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] | None = None
    events: list[tuple[str, int]] = field(default_factory=list)
    cache: DynamicCache | None = None
    sent: int = 0
    to_finish: dict[str, Any] | None = None
    finished: dict[str, Any] | None = None

    def spans(self, version: str) -> list[dict[str, Any]]:
        """Which version made which tokens."""
        count, spans = len(self.output_ids), []
        for name, end in [*self.events, (version, count)]:
            end = min(end, count)
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and name == spans[-1]["version"]:
                spans[-1]["end"] = end
                continue
            spans.append({"version": name, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans


class Scheduler:
    """Steps, and orders between them."""

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=getattr(torch, args.dtype)).eval()
        self.eos = self.model.generation_config.eos_token_id
        self.version = args.weight_version
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.prefixes: dict[tuple[str | None, tuple[int, ...]], tuple[DynamicCache, torch.Tensor]] = {}
        self.paused = False
        self.released = False
        self.randomness = torch.Generator().manual_seed(args.random_seed or 0)

    @property
    def fault(self) -> str:
        """What a test wants to go wrong now: the contents of a file."""
        file = os.environ.get("SGLANG_STAND_IN_FAULT")
        return Path(file).read_text() if file else ""

    def refusal(self, req: Req) -> str | None:
        """Why a request cannot be taken on. As the real one does, shorten a response that would be too long."""
        longest = self.args.context_length - 1
        if len(req.input_ids) >= longest - 5:
            return "the input is too long"
        if req.masked and not 1 <= req.params["top_k"] <= self.args.sampling_mask_max_tokens:
            return f"return_sampling_mask requires finite top_k; got top_k={req.params['top_k']}"
        room = 10 if self.fault == "has little memory" else longest - len(req.input_ids) - 1
        req.params["max_new_tokens"] = min(req.params["max_new_tokens"], room)
        return None

    @property
    def has_work(self) -> bool:
        return not self.paused and bool(self.running or self.waiting)

    @torch.no_grad()
    def step(self) -> list[Req]:
        """Start what waits, one token for what runs. Gives those that have something to tell."""
        assert not self.released, "a step without memory"
        starting = self.waiting[: self.args.max_running_requests - len(self.running)]
        del self.waiting[: len(starting)]
        for req in self.running:
            self._sample(req, self._forward(req, [req.output_ids[-1]]))
        for req in starting:
            self._sample(req, self._prefill(req))
        self.running += starting
        told = [req for req in self.running if self._has_news(req)]
        self.running = [req for req in self.running if req.finished is None]
        return told

    @torch.no_grad()
    def experts(self, req: Req) -> np.ndarray:
        """Of all tokens but the last, int32 ``[tokens, layers, top_k]``. The real one has kept them."""
        config, tokens = self.model.config, req.input_ids + req.output_ids
        found = np.zeros((len(tokens) - 1, config.num_hidden_layers, config.num_experts_per_tok), np.int32)

        def keep(layer: int) -> Any:
            return lambda module, args: found.__setitem__((slice(None), layer), args[1][:-1].numpy())

        layers = ((number, block.mlp) for number, block in enumerate(self.model.model.layers))
        routed = [(number, mlp.experts) for number, mlp in layers if hasattr(mlp, "experts")]
        hooks = [experts.register_forward_pre_hook(keep(number)) for number, experts in routed]
        self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return found

    def _has_news(self, req: Req) -> bool:
        unsent = len(req.output_ids) - req.sent
        interval = req.params.get("stream_interval") or 1
        return req.finished is not None or unsent >= interval or (req.sent == 0 and unsent > 0)

    def _prefill(self, req: Req) -> torch.Tensor:
        tokens = req.input_ids + req.output_ids
        key = (req.salt, tuple(req.input_ids))
        if req.logprob_start < 0 and not req.output_ids and key in self.prefixes:
            cache, logits = self.prefixes[key]
            req.cache = copy.deepcopy(cache)
            return logits.clone()
        req.cache = DynamicCache()
        logits = self.model(torch.tensor([tokens]), past_key_values=req.cache, use_cache=True).logits[0].float()
        if req.logprob_start >= 0:
            scores = torch.log_softmax(logits[:-1], -1)
            req.input_logprobs = [None, *scores[range(len(tokens) - 1), tokens[1:]].tolist()]
        if not req.output_ids:
            self.prefixes[key] = (copy.deepcopy(req.cache), logits[-1].clone())
        return logits[-1]

    def _forward(self, req: Req, tokens: list[int]) -> torch.Tensor:
        output = self.model(torch.tensor([tokens]), past_key_values=req.cache, use_cache=True)
        return output.logits[0, -1].float()

    def _sample(self, req: Req, logits: torch.Tensor) -> None:
        params, position = req.params, len(req.input_ids) + len(req.output_ids)
        temperature, top_k = params.get("temperature", 1.0), params.get("top_k", -1)
        if temperature < 1e-6:
            temperature, top_k = 1.0, 1
        logprobs = torch.log_softmax(logits / temperature, -1)
        probabilities, order = logprobs.exp().sort(descending=True)
        kept = probabilities.clone()
        if top_k > 0:
            kept[top_k:] = 0
        # Over the whole distribution, not over what top-k has left.
        kept[probabilities.cumsum(0) - probabilities > params.get("top_p", 1.0)] = 0
        generator = self.randomness
        if self.args.enable_deterministic_inference:
            digest = hashlib.sha256(f"{params.get('sampling_seed', 42)} {position}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        place = int(torch.multinomial(kept, 1, generator=generator))
        token = int(order[place])
        req.output_ids.append(token)
        req.logprobs.append(float(logprobs[token]))
        req.mask_logprobs.append(float((kept[place] / kept.sum()).log()))
        req.finished = self._finish(req, token)

    def _finish(self, req: Req, token: int) -> dict[str, Any] | None:
        if req.to_finish is not None:
            return req.to_finish
        ends = {*req.params.get("stop_token_ids", ()), *([self.eos] if self.eos is not None else ())}
        if not req.params.get("ignore_eos") and token in ends:
            return {"type": "stop", "matched": token}
        if len(req.output_ids) >= req.params["max_new_tokens"]:
            return {"type": "length", "length": req.params["max_new_tokens"]}
        return None

    def abort(self, prefix: str) -> list[Req]:
        """Those that waited end now, those that run after one more step."""
        ended = [req for req in self.waiting if req.rid.startswith(prefix)]
        self.waiting = [req for req in self.waiting if req not in ended]
        for req in ended:
            req.finished = {"type": "abort", "message": "Abort in waiting queue"}
        for req in self.running:
            if req.rid.startswith(prefix):
                req.to_finish = {"type": "abort", "message": "Aborted", "status_code": None}
        return ended

    def pause(self, mode: str) -> None:
        self.paused = True
        if mode == "retract":
            for req in self.running:
                req.cache = None
            self.waiting = self.running + self.waiting
            self.running = []

    def go_on(self) -> None:
        self.paused = False

    def flush(self) -> bool:
        """Empty the caches, unless they are in use."""
        if self.running or (self.waiting and not self.paused):
            return False
        self.prefixes.clear()
        return True

    def update(self, folder: str, version: str | None, flush_cache: bool) -> tuple[bool, str]:
        """Read a checkpoint over the weights."""
        assert not self.released, "weights without memory"
        if self.fault != "keeps its weights":
            for path in sorted(Path(folder).glob("*.safetensors")):
                for name, tensor in load_file(path).items():
                    if self.fault == "fails half-way":
                        return False, f"Failed to update weights: {name}."
                    skipped = self.fault.removeprefix("skips ") if self.fault.startswith("skips ") else None
                    if skipped is None or not re.search(skipped, name):
                        self._load_tensor(name, tensor)
        if version is not None and version != self.version:
            for req in [*self.running, *self.waiting]:
                if req.output_ids:
                    req.events.append((self.version, len(req.output_ids)))
            self.version = version
        if flush_cache and not self.flush():
            return False, "Weights were updated, but the cache was not flushed"
        return True, "Succeeded to update model weights."

    @torch.no_grad()
    def _load_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """``load_weights`` of the real models: experts one by one, and what is not known is skipped without a word."""
        parameters = dict(self.model.named_parameters())
        expert = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if expert is None:
            if name in parameters and ".mlp.experts." not in name:
                parameters[name].copy_(tensor)
            return
        fused = f"{expert[1]}.{'down_proj' if expert[3] == 'down' else 'gate_up_proj'}"
        if fused in parameters:
            own, rows = parameters[fused][int(expert[2])], len(tensor)
            start = rows if expert[3] == "up" else 0
            own[start : start + rows].copy_(tensor)

    def _layout(self) -> dict[str, list[torch.Tensor]]:
        """The real models' parameters, and what each is fused from."""
        layout: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self.model.named_parameters():
            for pattern, fused in FUSED.items():
                name = re.sub(pattern, fused, name)
            layout.setdefault(name, []).append(tensor.detach())
        return layout

    def checksums(self) -> dict[str, str]:
        """Of each parameter in the layout of the real models; one that the model lacks has none."""
        lacks = self.fault.removeprefix("lacks ") if self.fault.startswith("lacks ") else None
        return {
            name: hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
            for name, tensors in self._layout().items()
            if lacks is None or not re.search(lacks, name)
        }

    def reset(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.uniform_()

    def weights_by_name(self, name: str, most: int) -> list[Any] | None:
        """Some of the real models can, Llama's among them, most cannot."""
        if self.model.config.model_type != "llama":
            return None
        values = dict(self.model.named_parameters())[name].detach().clone()
        if self.fault == "holds something else":
            values.view(-1)[0] += 1
        return values.float().tolist()[:most]

    def release(self) -> None:
        assert self.args.enable_memory_saver and not self.running and (self.paused or not self.waiting), "not idle"
        self.prefixes.clear()
        self.released = True

    def take_back(self) -> None:
        assert self.args.enable_weights_cpu_backup, "the weights are gone"
        self.released = False
