"""Settings of validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.schema.arguments import DataArguments, ValidationGeneratingArguments
from roll.configs.schema.options import POSITIVE, option


@dataclass
class ValidationSettings:
    """Sampling and timing of validation."""

    generating_args: ValidationGeneratingArguments = option(
        factory=ValidationGeneratingArguments, help="Sampling in validation; greedy by default."
    )
    mode: Literal["pause", "overlap"] = option(
        "pause", help="`pause`: no training group starts while validation runs; `overlap`: both share the engine."
    )
    timeout_seconds: float = option(
        1800.0, help="Longest time for one validation before the run fails.", range=POSITIVE
    )


@dataclass
class ValidationConfig(ValidationSettings):
    """Validation prompts and their own sampling parameters."""

    data_args: DataArguments = option(factory=DataArguments, help="Validation prompts.")
