"""`diffusers_infer`: image generation with a flow-matching model, with continuous batching over denoising steps.

Images join and leave the batch between two steps, and rows of a forward pass may be at different steps. Steps inside an
image's window are stochastic (SDE) and are its tokens: each has a log-probability and the weight version that produced
it. All other steps are deterministic (ODE). Random numbers are determined by the request's seed and the step number.
Guarantee: on a CPU, an image and its record are bitwise independent of the other images in the batch.

Between two steps, the state of an image is just its latents, so weight updates (`keep`) and interruptions lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.configs.plugins import made
from roll.configs.roles import PictureSampling
from roll.data.records import PictureStep, derive_seed
from roll.engines.base import FinishReason, GenerateRequest, Picture, PictureRequest, TokenChunk, no_tokens
from roll.engines.hf.engine import ActiveRequest
from roll.engines.hf.strategy import HFInferStrategy
from roll.engines.hf.weights import ModelEngine
from roll.engines.options import DiffusersInferConfig
from roll.pictures.model import Conditions, FrozenParts, Schedule, load_transformer
from roll.runtime.process import keep_blocks_of

ROW_MULTIPLE = 8
"""Forward passes are padded to a multiple of this many rows per thread. A CPU's matrix products give a row the same
bits if each thread gets at least 4 rows; this is twice that."""
STARTING_NOISE = "starting noise"
"""Seed component of the initial latents' noise; that of a step is the step's number."""


@dataclass(eq=False)
class Drawing:
    """An image that is being generated."""

    active: ActiveRequest
    asked: PictureRequest
    shape: tuple[Any, ...]
    """Sampling settings as a tuple. Images with equal settings share a forward pass."""
    schedule: Schedule
    conditions: Conditions
    """Prompt embeddings, one row."""
    latents: Tensor
    """float32: current latents, in the shape that the transformer takes."""
    step: int = 0
    """Number of the next denoising step."""
    trail: list[Tensor] = field(default_factory=list)
    """Latents before the first stochastic step, and after each of them."""
    means: list[Tensor] = field(default_factory=list)
    """Mean of each stochastic step, if the sampling settings ask for it."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token."""
    versions: list[int] = field(default_factory=list)
    """Weight version of each token."""
    newest_version: int = -1
    """Newest weight version of all steps so far, deterministic ones included."""

    @property
    def is_noisy(self) -> bool:
        """True if the next denoising step is stochastic (an SDE step)."""
        return self.asked.window is not None and self.step in self.asked.window

    @property
    def tokens(self) -> range:
        """Numbers of the steps that are tokens: the window, or all steps if there is none."""
        return range(self.asked.sampling.num_inference_steps) if self.asked.window is None else self.asked.window

    def noise(self, of: int | str) -> Tensor:
        """Return the Gaussian noise of step number ``of``, or of the initial latents (`STARTING_NOISE`)."""
        seed = derive_seed(self.active.request.sampling.seed, of)
        return torch.randn(self.latents.shape, generator=torch.Generator().manual_seed(seed)).to(self.latents.device)

    def advance(self, drawn: Tensor, mean: Tensor, logprob: float, version: int) -> None:
        """Record a step: its resulting latents ``drawn``, their mean, log-probability and weight version."""
        if self.step in self.tokens:
            if self.is_noisy and not self.trail:
                self.trail.append(self.latents)
            self.logprobs.append(logprob)
            self.versions.append(version)
        if self.is_noisy:
            self.trail.append(drawn)
            if self.asked.sampling.log_prob == "guard":
                self.means.append(mean)
        self.latents = drawn
        self.newest_version = max(self.newest_version, version)
        self.step += 1

    def chunk(self) -> TokenChunk:
        """Return the tokens so far, as a chunk."""
        known = len(self.versions)
        return TokenChunk(
            np.array(self.tokens[:known], np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
        )


class PictureEngine(ModelEngine):
    """Image engine: generates many independent images with one model. All methods must be called from one thread.

    Has the interface of `HFEngine`. A denoising step of an image counts as a generated token."""

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        options: DiffusersInferConfig,
        adapter_rank: int | None = None,
    ) -> None:
        """Load the diffusers pipeline in the folder ``path``: transformer, text encoders and VAE.

        ``adapter_rank`` is that of `ModelEngine`."""
        transformer = load_transformer(path, dtype)
        if device.type == "cpu":
            keep_blocks_of(transformer.num_parameters())
        transformer.to(device).requires_grad_(False)
        for parameter in transformer.parameters():
            # Some kernels' results depend on memory alignment, which differs between mapped files and weight updates.
            parameter.data = parameter.data.clone()
        super().__init__(transformer, adapter_rank)
        self._path = path
        self._options = options
        self._frozen = FrozenParts(path, transformer, dtype, device, decodes=True)
        self._row_multiple = ROW_MULTIPLE * torch.get_num_threads() if device.type == "cpu" else 1
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self._drawings: list[Drawing] = []

    @property
    def running(self) -> int:
        """Number of images that are being generated."""
        return len(self._drawings)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Abort these requests (None: all); their results have no image. Unknown ids are ignored."""
        names = None if request_ids is None else set(request_ids)

        def chosen(active: ActiveRequest) -> bool:
            return names is None or active.request.request_id in names

        for drawing in [each for each in self._drawings if chosen(each.active)]:
            self._drawings.remove(drawing)
            self._end(drawing.active, drawing.chunk(), "abort")
        for active in [each for each in self._waiting if chosen(each)]:
            self._waiting.remove(active)
            self._end(active, no_tokens(), "abort")

    def progress(self, known: Mapping[str, int]) -> list[tuple[ActiveRequest, TokenChunk]]:
        """Return the denoising steps of each image after the first ``known[id]`` ones, as placeholder tokens that only
        indicate progress."""
        chunks = []
        for drawing in self._drawings:
            new = range(known.get(drawing.active.request.request_id, 0), drawing.step)
            if new:
                nothing = np.zeros(len(new), np.float32)
                chunk = TokenChunk(np.array(new, np.int32), nothing, np.full(len(new), self.version, np.int32))
                chunks.append((drawing.active, chunk))
        return chunks

    @torch.inference_mode()
    def score_steps(self, steps: Sequence[PictureStep]) -> list[np.ndarray]:
        """See `InferStrategy.score_steps`. Runs one forward pass per step."""
        if self.asleep:
            raise RuntimeError("the engine sleeps; wake it before score_steps")
        return [np.array([0.0, self._score(each)], np.float32) for each in steps]

    def _score(self, asked: PictureStep) -> float:
        schedule = self._schedule(asked.sampling)
        before, after = torch.from_numpy(np.array(asked.latents)).to(self._device).split(1)
        step = torch.tensor([asked.step], device=self._device)
        conditions = self._frozen.conditions([asked.prompt], asked.sampling)
        predicted = schedule.velocity(self._model, before, step, conditions)
        return float(schedule.log_probs(after, *schedule.moments(before, predicted, step)))

    def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Raise ``RuntimeError``: an image engine cannot score text."""
        raise RuntimeError("an engine of pictures scores no tokens of text")

    @torch.inference_mode()
    def step(self, admit: bool = True) -> None:
        """Admit queued requests (if ``admit``), and take one denoising step of every image."""
        self.clock.set(True)
        if admit:
            self._admit()
        for batch in self._batches():
            self._advance(batch)
        for drawing in [each for each in self._drawings if each.step == each.asked.sampling.num_inference_steps]:
            self._drawings.remove(drawing)
            self._end(drawing.active, drawing.chunk(), "stop", self._picture(drawing))
        self.clock.set(False)

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        self._frozen.move(device)

    def _admit(self) -> None:
        while self._waiting and self.running < self._options.max_running_requests:
            active = self._waiting.popleft()
            try:
                self._drawings.append(self._begun(active))
            except Exception as error:  # e.g. the text encoders reject the prompt
                self.refuse(active, error)

    def _begun(self, active: ActiveRequest) -> Drawing:
        asked = active.request.picture
        if asked is None:
            raise ValueError(f"request {active.request.request_id!r} asks for no picture")
        sampling, schedule = asked.sampling, self._schedule(asked.sampling)
        drawing = Drawing(
            active,
            asked,
            _shape(sampling),
            schedule,
            self._frozen.conditions([asked.prompt], sampling),
            torch.empty(schedule.latent_shape, device=self._device),
        )
        drawing.latents = drawing.noise(STARTING_NOISE)
        return drawing

    def _schedule(self, sampling: PictureSampling) -> Schedule:
        shape = _shape(sampling)
        if shape not in self._schedules:
            self._schedules[shape] = Schedule.of(sampling, self._path)
        return self._schedules[shape]

    def _batches(self) -> list[list[Drawing]]:
        by_shape: dict[tuple[Any, ...], list[Drawing]] = {}
        for drawing in self._drawings:
            by_shape.setdefault(drawing.shape, []).append(drawing)
        return list(by_shape.values())

    def _advance(self, batch: list[Drawing]) -> None:
        """Take one denoising step of images with equal sampling settings, in one forward pass."""
        rows = [*batch, *[batch[-1]] * (-len(batch) % self._row_multiple)]
        schedule = batch[0].schedule
        latents = torch.stack([row.latents for row in rows])
        steps = torch.tensor([row.step for row in rows], device=self._device)
        noisy = torch.tensor([row.is_noisy for row in rows], device=self._device)
        conditions = Conditions.joined([row.conditions for row in rows])
        predicted = schedule.velocity(self._model, latents, steps, conditions)
        drawn, std = schedule.moments(latents, predicted, steps, noisy)
        mean = drawn.clone()
        for number, row in enumerate(batch):
            if row.is_noisy:
                drawn[number] += std[number] * row.noise(row.step)
        logprobs = schedule.log_probs(drawn, mean, std).tolist()
        for number, row in enumerate(batch):
            row.advance(drawn[number], mean[number], logprobs[number], self.version)
        self.generated_tokens += len(batch)

    def _picture(self, drawing: Drawing) -> Picture:
        latents = torch.stack(drawing.trail or [drawing.latents])
        image = self._frozen.picture(drawing.latents, drawing.asked.sampling)
        means = torch.stack(drawing.means).cpu().numpy() if drawing.means else None
        return Picture(image, latents.cpu().numpy(), drawing.newest_version, means)

    def _end(
        self, active: ActiveRequest, chunk: TokenChunk, reason: FinishReason, picture: Picture | None = None
    ) -> None:
        whole = chunk.completion(active.request.request_id, reason)
        whole.picture = picture
        self._events.append((active, whole))


def _shape(sampling: PictureSampling) -> tuple[Any, ...]:
    """Return the batching key: images with equal sampling settings share a forward pass."""
    return tuple(vars(sampling).values())


class DiffusersInferStrategy(HFInferStrategy):
    """One replica of the image engine: a `PictureEngine` in a thread, like the engine of `hf_infer`."""

    _drawing_options: DiffusersInferConfig

    def _read_options(self) -> None:
        where = "strategy_args.strategy_config"
        self._drawing_options = made("diffusers_infer", DiffusersInferConfig, self._strategy_config, where)

    def _build_engine(self) -> Any:
        options, spec = self._drawing_options, self._spec
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        dtype, device = getattr(torch, spec.dtype), torch.device(spec.device)
        return PictureEngine(spec.model_path, dtype, device, options, self._adapter_rank)

    def _check_request(self, request: GenerateRequest) -> None:
        asked = request.picture
        if asked is None:
            raise ValueError(f"request {request.request_id!r} cannot run: it asks for no picture")
        steps = asked.sampling.num_inference_steps
        if asked.window is not None and not (asked.window and 0 <= min(asked.window) <= max(asked.window) < steps):
            raise ValueError(f"request {request.request_id!r} cannot run: {asked.window} is not within {steps} steps")

    async def score_steps(self, steps: Sequence[PictureStep]) -> list[np.ndarray]:
        engine: Any = self._live_thread().engine
        found: list[np.ndarray] = await self._live_thread().call(lambda _: engine.score_steps(steps))
        return found
