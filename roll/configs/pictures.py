"""The keys of `sampling`: how a flow-matching model draws pictures, and which of its steps are decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from roll.configs.fields import Count, Positive, Range, option


@dataclass
class PictureSampling:
    """Settings of drawing pictures, in training and in validation (which adds no noise)."""

    height: Count = option(512, "Height of the pictures in pixels.")
    width: Count = option(512, "Width of the pictures in pixels.")
    num_inference_steps: Count = option(10, "Denoising steps of a picture.")
    guidance_scale: Annotated[float, Range(at_least=1)] = option(
        1.0,
        "Classifier-free guidance: v = v_negative + scale (v_prompt - v_negative), in sampling and in training. 1: "
        "none, and one pass of the model per step in place of two.",
    )
    negative_prompt: str = option("", "What guidance leads away from.")
    max_sequence_length: Annotated[int, Range(at_least=1, at_most=512)] = option(
        256, "Tokens of a prompt for the T5 encoder; a model without one gets as many zeros. diffusers' default is 256."
    )
    shift: Positive | None = option(
        None, "Shift of the noise levels towards noise. Default: that of the model's scheduler."
    )
    kind: Literal["flow_sde", "cps", "dance"] = option(
        "flow_sde",
        "What a step with noise draws from: `flow_sde` (Flow-GRPO), `cps` (coefficients-preserving sampling) or "
        "`dance` (DanceGRPO). See `docs/images.md`.",
    )
    noise_level: Positive = option(0.7, "Strength of that noise; for `cps` below 1.")
    window_size: Count = option(
        2, "Steps in a row that have noise and are trained on; all others follow the ODE (Flow-GRPO-Fast)."
    )
    window_reach: Count | None = option(
        None,
        "The window lies among the first so many steps, at a place drawn for each group; the last step never has "
        "noise. Default: half of the steps, where most of the picture is decided.",
    )
    log_prob: Literal["mean", "sum"] = option(
        "mean",
        "What a step's log-probability is: the mean over the dimensions of the latent, whose ratio stays near 1 (clip "
        "ranges of 1e-5 to 1e-3), or the sum (clip ranges near 0.2).",
    )

    @property
    def reach(self) -> int:
        """Number of steps at the beginning among which the window lies."""
        return max(self.window_size, self.num_inference_steps // 2) if self.window_reach is None else self.window_reach
