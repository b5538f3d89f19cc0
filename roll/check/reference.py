"""The reference pages of losses, advantages and corrections: `python -m roll.check.reference docs/algorithms`.

The output is `policy_losses.md`, `advantages.md` and `correction.md` in that folder, made from the signatures
of the functions and their descriptions. A test keeps them equal, so the pages cannot drift from the code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any

from roll.algorithms.advantages.base import ADVANTAGE_ESTIMATORS
from roll.algorithms.correction import Correction, DivergenceRejection, ImportanceWeight, RatioRejection
from roll.algorithms.losses.base import POLICY_LOSSES
from roll.algorithms.registry import about_of, settings_of
from roll.configs.plugins import Kind, PlugIn, help_text, parameters_of, type_in_words

POLICY_LOSSES_HEAD = """\
# Policy losses: `actor_train.pg_variant`

`python -m roll.check.reference docs/algorithms` writes this page from the functions in `roll/algorithms`.

π is the policy being updated, μ the one that sampled the token (its log-probability is recorded at sampling), ρ the
ratio of π to the old policy, which is μ by default and the trainer's policy before its first update on the batch with
`old_logprobs: recompute`; A is the advantage, sg stops the gradient. Formulas are per response token; `loss_agg_mode`
makes one number of them. Arguments go to `actor_train.pg_variant_args`. `clip_fraction` among the metrics is the
share of tokens whose weight or gradient a bound has changed.
"""

ADVANTAGES_HEAD = """\
# Advantages: `adv_estimator`

`python -m roll.check.reference docs/algorithms` writes this page from the functions in `roll/algorithms`.

r is the reward of a sample (its score after shaping), n the number of samples in its group. Arguments go to
`adv_estimator_args`. A sample alone in its group and a group of equal rewards have advantage 0 wherever samples are
compared. `whiten_advantages` gives the advantages of a batch mean 0 and deviation 1 over its response tokens, and
`advantage_clip` bounds them, last of all. An estimator that reads values needs a
[critic](../critic.md). Those that need turns are for episodes of several turns; `rlvr` refuses them.
"""


CORRECTION_HEAD = """\
# Off-policy correction: `train_infer_correction`

`python -m roll.check.reference docs/algorithms` writes this page from the fields in
`roll/algorithms/correction.py`.

The trainer computes the log-probabilities of a batch before its first update on it, and compares them with those that
the engine recorded when it sampled: ρ = proximal / behaviour. That distance is staleness and the difference between two
implementations of one model together. A weight multiplies the policy loss of each token; rejection takes tokens or
whole responses out of the loss, numerator and normaliser alike. Sequence values are those of the whole response, before
any token is left out. One weight and any number of rejections compose.

With a loss that has a ratio to the behaviour policy itself a weight would count the distance twice, and is refused: use
it with `old_logprobs: recompute`, or with a loss without a ratio (`vanilla`, `kimi15`). Rejection goes with every loss.

- TIS, truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561):
  `weight: {level: token, mode: truncate, upper: 2}`; with `level: sequence` less bias, and a variance that grows with
  the length.
- MIS, masked importance sampling (Liu et al. 2025): `weight: {level: sequence, mode: mask, upper: 2}`.
- IcePop (arXiv 2510.18855): `weight: {level: token, mode: mask, lower: 0.5, upper: 5}`.
- Geometric mask, for a difference of engines only: `reject: [{level: geometric, lower: 0.99, upper: 1.001}]`.
- Sequences masked by their mean divergence (akin to arXiv 2512.23075):
  `reject: [{level: geometric, divergence: k3, threshold: 0.01}]`.

```yaml
old_logprobs: recompute
train_infer_correction:
  weight: {level: token, mode: truncate, upper: 2.0}
  reject: [{level: sequence, upper: 20.0}]
```

Its metrics are `correction/...`: `clipped_share`, `rejected_share`, `rejected_sequences_share`, `weight_mean`, and
`ess`, `k1`, `k3`, `chi2` of ρ, also per lag.
"""

CORRECTION_PARTS = (
    ("`train_infer_correction`", Correction),
    ("`weight`", ImportanceWeight),
    ("`reject`: by ratio", RatioRejection),
    ("`reject`: by divergence", DivergenceRejection),
)


def pages() -> dict[str, str]:
    """Return the pages: file name -> Markdown."""
    return {
        "policy_losses.md": _page(POLICY_LOSSES_HEAD, POLICY_LOSSES),
        "advantages.md": _page(ADVANTAGES_HEAD, ADVANTAGE_ESTIMATORS),
        "correction.md": CORRECTION_HEAD
        + "".join(f"\n## {title}\n{_table(parameters_of(record, title, title))}" for title, record in CORRECTION_PARTS),
    }


def _page(head: str, kind: Kind[PlugIn]) -> str:
    return head + "".join(_section(kind, name) for name in sorted(kind.built_in))


def _section(kind: Kind[PlugIn], name: str) -> str:
    function = kind.load(name, name)
    about = about_of(function)
    assert about is not None, f"{name} has no description"
    table = _table(settings_of(function, name, name)) or "\nNo arguments.\n"
    return f"\n## `{name}`\n\n{about.formula}\n\n- Source: {about.source}\n- When: {about.use}\n{table}"


def _table(parameters: Mapping[str, Parameter]) -> str:
    rows = "".join(_row(each) for each in parameters.values())
    return f"\n| argument | type | default | meaning |\n|---|---|---|---|\n{rows}" if rows else ""


def _row(parameter: Parameter) -> str:
    required = parameter.default is Parameter.empty
    default = "none: it must be given" if required else f"`{_shown(parameter.default)}`"
    meaning = help_text(parameter.annotation).replace("|", "\\|")
    return f"| `{parameter.name}` | {type_in_words(parameter.annotation)} | {default} | {meaning} |\n"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if value == ():
        return "[]"
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def main() -> None:
    """Write the pages into the folder given as the first argument."""
    folder = Path(sys.argv[1])
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
