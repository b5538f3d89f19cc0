"""The records of a run (prompt, sample, group, batch), their encoding as bytes, and reproducible seeds.

Everything is ragged numpy until a micro-batch is built. A sample's arrays have one entry per token of prompt plus
response. An entry describes *that* token (its log-probability given the tokens before it), so nothing is shifted before
a trainer shifts it. If the response mask is 0, the other arrays hold 0 (versions: -1) and have no meaning.

A finished group is encoded as bytes without loss, so that it outlives the process that made it: a JSON header, then the
arrays and the responses' texts; nothing is ever unpickled. The fields of a prompt that only scoring needs (ground
truth, metadata, messages) are left out, since a finished group has been scored; they are in the data. A picture is left
out as well, since training uses its latents.

A run's seed and a name give the same derived seed on any machine, in any order (`derive_seed`). No random generator is
shared between parts of a run, so drawing in one part never changes another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from roll.configs.roles import PictureSampling

_SCORING_ONLY = ("ground_truth", "metadata", "messages")
_SEEN_ONLY = ("image",)
_SIZE_BYTES = 8
_TEXT = "text"
"""In the header, in the place of an array's dtype: UTF-8, whose length is in bytes."""
ROUTED = "routed_experts"
"""Name of the recorded experts in samples and batches."""


def encode_group(group: Group, before: bytes = b"") -> bytes:
    """Return the bytes of a finished group, after the bytes ``before``."""
    contents: list[memoryview | bytes] = []

    def form(value: Any) -> Any:
        """Return the header's entry for an array, for a text that is written like one, or for a NumPy number."""
        if isinstance(value, _Text):
            contents.append(value.content.encode(errors="surrogatepass"))
            return {"dtype": _TEXT, "length": len(contents[-1])}
        if not isinstance(value, np.ndarray):
            return float(value)
        contents.append(np.ascontiguousarray(value).data)
        own = {"shape": value.shape} if value.ndim > 1 else {}
        return {"dtype": value.dtype.str, "length": value.size, **own}

    prompt = {name: value for name, value in _declared(group.prompt).items() if name not in _SCORING_ONLY}
    header = _declared(group) | {"prompt": prompt, "samples": [_sample(sample) for sample in group.samples]}
    text = json.dumps(header, default=form).encode()
    # The only copy of the arrays, if they are contiguous.
    return b"".join([before, len(text).to_bytes(_SIZE_BYTES, "little"), text, *contents])


@dataclass(frozen=True)
class _Text:
    """A long text. As a part of the header it would be escaped letter by letter."""

    content: str


def _sample(sample: Sample) -> dict[str, Any]:
    declared = {name: value for name, value in _declared(sample).items() if name not in _SEEN_ONLY}
    text = declared.get("response_text")
    return declared | {"response_text": _Text(text)} if isinstance(text, str) else declared


def _declared(record: Prompt | Sample | Group) -> dict[str, Any]:
    """Return the declared fields of a record, without attributes that a plug-in may have added.

    Fields that are None by default are left out while they are.
    """
    return {
        item.name: value
        for item in fields(record)
        if (value := getattr(record, item.name)) is not None or item.default is not None
    }


def decode_group(data: bytes) -> Group:
    """Return the group that `encode_group` encoded. Raises `ValueError` for other bytes."""
    if len(data) < _SIZE_BYTES:
        raise ValueError("these bytes are no group")
    offset = start = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")

    def take(found: dict[str, Any]) -> Any:
        """Return the next array or text if ``found`` describes one, else ``found``. They come in that order."""
        nonlocal offset
        if not isinstance(found.get("dtype"), str):
            return found
        if found["dtype"] == _TEXT:
            begin, offset = offset, offset + found["length"]
            return data[begin:offset].decode(errors="surrogatepass")
        array = np.frombuffer(data, dtype=np.dtype(found["dtype"]), count=found["length"], offset=offset).copy()
        offset += array.nbytes
        return array.reshape(found["shape"]) if "shape" in found else array

    header = json.loads(data[_SIZE_BYTES:start], object_hook=take)
    if offset != len(data):
        raise ValueError(f"a group of {offset} bytes cannot have {len(data)}")
    samples = [Sample(**sample) for sample in header["samples"]]
    return Group(**header | {"prompt": Prompt(**header["prompt"]), "samples": samples})


@dataclass(frozen=True)
class Prompt:
    """The start of a rollout."""

    prompt_id: str
    """Unique and stable in its data set, for example ``train.jsonl:17``."""
    domain: str
    token_ids: np.ndarray
    """int32 ``[prompt_length]``."""
    text: str
    """The rendered prompt, as tokenised."""
    ground_truth: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    """The prompt as a conversation, for judges that are models with a template of their own."""
    pictures: list[np.ndarray] = field(default_factory=list)
    """uint8 ``[bytes]``: the file of each picture in the prompt, in order, whose placeholders are in ``token_ids``."""


@dataclass
class Sample:
    """One response to a prompt (or one episode)."""

    token_ids: np.ndarray
    """int32 ``[length]``: prompt and response."""
    response_mask: np.ndarray
    """bool ``[length]``: true for tokens that the policy chose."""
    behaviour_logprobs: np.ndarray
    """float32 ``[length]``: log-probability under the distribution the token was sampled from."""
    versions: np.ndarray
    """int32 ``[length]``: policy version that produced the token."""
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    response_text: str = ""
    score: float = 0.0
    """Raw verifier output."""
    reward: float = 0.0
    """Score after normalisation and penalties."""
    metrics: dict[str, float] = field(default_factory=dict)
    episode: int | None = None
    """Number of the group's episode to which this sample belongs; None: the sample is an episode by itself."""
    turns: np.ndarray | None = None
    """int32 ``[length]``: the episode's turn of each sampled token, from 0; elsewhere -1."""
    turn_rewards: np.ndarray | None = None
    """float32 ``[length]``: the turn's reward, penalties included, at the last sampled token of each turn; else 0."""
    turn_states: np.ndarray | None = None
    """int64 ``[length]``: id of the state in which a turn acted, at its sampled tokens; elsewhere -1."""
    latents: np.ndarray | None = None
    """float32 ``[sampled tokens + 1, ...]`` in the shape that the model takes, for pictures only: latents before the
    first trained step and after each one. The sampled tokens of a picture are the numbers of its trained steps."""
    means: np.ndarray | None = None
    """float32 ``[sampled tokens, ...]`` in that shape, with ``sampling.log_prob: guard`` only: the mean of each trained
    step's Gaussian when it was sampled."""
    image: np.ndarray | None = None
    """uint8 ``[height, width, 3]``, for pictures only: the decoded picture."""
    newest_version: int = -1
    """Newest policy version behind any denoising step, for pictures only; just some of these steps are tokens."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 ``[length, layers, experts per token]``, with router replay only: the experts that the engine sent
    each token to. Nothing is known of the last token (0), whose results the engine never computed."""

    @property
    def response_tokens(self) -> int:
        """Number of tokens that the policy chose."""
        return int(np.count_nonzero(self.response_mask))

    @property
    def oldest_version(self) -> int:
        """Smallest version among the sampled tokens; -1 without sampled tokens."""
        return int(self.versions[self.response_mask].min()) if self.response_mask.any() else -1


@dataclass
class Group:
    """The samples of one prompt, which are accepted, dropped and trained on together."""

    group_id: int
    prompt: Prompt
    samples: list[Sample]
    baseline_score: float | None = None
    """Score of a greedy response to the prompt, which is not trained on; None: not requested."""
    baseline_version: int = -1
    """Newest policy version among the tokens of the greedy response; -1 without one."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds since the epoch at which the group was ``issued``, ``generated`` (its last response; not for episodes),
    ``judged`` and ``consumed``, as far as that has happened."""
    waits: list[float] = field(default_factory=list)
    """Seconds in which the environment of each episode worked; empty if there are none."""

    @property
    def episodes(self) -> list[list[Sample]]:
        """Samples of each episode, in order; a sample without an episode number is an episode by itself."""
        parts: list[list[Sample]] = []
        for sample in self.samples:
            if parts and sample.episode is not None and parts[-1][0].episode == sample.episode:
                parts[-1].append(sample)
            else:
                parts.append([sample])
        return parts

    @property
    def scores(self) -> np.ndarray:
        """Scores of the episodes, float64 ``[episodes]``."""
        return np.array([parts[0].score for parts in self.episodes], dtype=np.float64)


@dataclass(frozen=True)
class PictureStep:
    """A denoising step whose log-probability an engine is asked for, in the parity check."""

    prompt: str
    sampling: PictureSampling
    step: int
    latents: np.ndarray
    """float32 ``[2, ...]``: latents before and after the step."""


@dataclass
class SampleBatch:
    """Samples as flat arrays, cheap to send and to slice: the form that a trainer receives.

    ``tokens`` maps a name to an array ``[total_tokens]``. It always has ``token_ids`` and ``response_mask``; for
    training also ``behaviour_logprobs``, ``versions``, ``advantages`` and the objective's fields; for episodes also
    ``turns``, ``turn_rewards`` and ``turn_states``; with router replay `ROUTED` (see `Sample`). ``per_sample`` maps a
    name to an array ``[samples, ...]``; pictures have their ``latents``, ``means`` and ``prompts`` (texts) there.
    ``prompt_pictures`` are tuples of the pictures in the prompts (see `Prompt`), if any prompt has one. ``loss_mask``
    (bool) is the part of the response mask that is trained on, if not all of it. Sample ``i`` owns
    ``offsets[i]:offsets[i + 1]``.
    """

    lengths: np.ndarray
    """int64 ``[samples]``."""
    tokens: dict[str, np.ndarray]
    per_sample: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for name, values in self.tokens.items():
            if len(values) != total:
                raise ValueError(f"token field {name!r} has {len(values)} entries, the lengths sum to {total}")
        for name, values in self.per_sample.items():
            if len(values) != len(self.lengths):
                raise ValueError(f"sample field {name!r} has {len(values)} entries for {len(self.lengths)} samples")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """Start of each sample in the token fields, and their end: int64 ``[samples + 1]``."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> SampleBatch:
        """Flatten samples; ``per_sample`` gets ``scores`` and ``rewards`` (float32)."""
        if not samples:
            raise ValueError("a batch needs at least one sample")
        names = ["token_ids", "response_mask", "behaviour_logprobs", "versions"]
        with_turns = [sample.turns is not None for sample in samples]
        if any(with_turns) and not all(with_turns):
            raise ValueError("some samples of the batch record turns and others do not: their rewards would be lost")
        if all(with_turns):
            names += ["turns", "turn_rewards", "turn_states"]
        routed = [sample.routed_experts is not None for sample in samples]
        if any(routed) and not all(routed):
            raise ValueError("some samples of the batch record their experts and others do not: set `routed_experts`")
        if all(routed):
            names.append(ROUTED)
        return cls(
            lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int64),
            tokens={name: np.concatenate([getattr(sample, name) for sample in samples]) for name in names},
            per_sample={
                "scores": np.array([sample.score for sample in samples], dtype=np.float32),
                "rewards": np.array([sample.reward for sample in samples], dtype=np.float32),
                **_of_pictures(samples),
            },
        )

    @classmethod
    def concatenated(cls, batches: Sequence[SampleBatch]) -> SampleBatch:
        """Return the samples of all batches. They have the same fields, but for ``loss_mask`` and ``prompt_pictures``,
        which only some may have."""
        fields, own = [batch.tokens for batch in batches], [batch.per_sample for batch in batches]
        if any("loss_mask" in tokens for tokens in fields):
            fields = [{"loss_mask": tokens["response_mask"], **tokens} for tokens in fields]
        if any("prompt_pictures" in values for values in own):
            none = np.frompyfunc(lambda _: (), 1, 1)
            own = [{"prompt_pictures": none(batch.lengths), **batch.per_sample} for batch in batches]
        return cls(
            lengths=np.concatenate([batch.lengths for batch in batches]),
            tokens={name: np.concatenate([tokens[name] for tokens in fields]) for name in fields[0]},
            per_sample={name: np.concatenate([values[name] for values in own]) for name in own[0]},
        )

    def unrouted(self) -> SampleBatch:
        """Return the batch without recorded experts, for models that route by themselves. Other fields are shared."""
        if ROUTED not in self.tokens:
            return self
        tokens = {name: values for name, values in self.tokens.items() if name != ROUTED}
        return SampleBatch(self.lengths, tokens, self.per_sample)

    def joined(self, parts: Sequence[int] | np.ndarray) -> SampleBatch:
        """Join neighbouring samples: each entry of ``parts`` is the number of samples that become one.

        Token fields are shared with this batch; sample fields are those of the first sample. Raises `ValueError` if
        ``parts`` do not add up to the samples, or one is below 1.
        """
        parts = np.asarray(parts, dtype=np.int64)
        if parts.sum() != len(self) or (len(parts) and parts.min() < 1):
            raise ValueError(f"{parts.tolist()} are no parts of {len(self)} samples")
        first = np.concatenate([[0], np.cumsum(parts)])[:-1]
        return SampleBatch(
            lengths=np.add.reduceat(self.lengths, first) if len(first) else self.lengths,
            tokens=self.tokens,
            per_sample={name: values[first] for name, values in self.per_sample.items()},
        )

    def select(self, rows: Sequence[int] | np.ndarray) -> SampleBatch:
        """Return the given samples, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        starts, ends = self.offsets[:-1][rows].tolist(), self.offsets[1:][rows].tolist()
        spans = [slice(0, 0), *map(slice, starts, ends)]
        return SampleBatch(
            lengths=self.lengths[rows],
            tokens={name: np.concatenate([values[span] for span in spans]) for name, values in self.tokens.items()},
            per_sample={name: values[rows] for name, values in self.per_sample.items()},
        )

    def split(self, sizes: Sequence[int]) -> list[SampleBatch]:
        """Return consecutive batches of these numbers of samples, which share this one's arrays.

        Raises `ValueError` if the numbers do not add up to the samples.
        """
        if sum(sizes) != len(self):
            raise ValueError(f"{list(sizes)} are no parts of {len(self)} samples")
        offsets, ends = self.offsets.tolist(), np.cumsum(sizes).tolist()
        return [
            SampleBatch(
                self.lengths[start:end],
                {name: values[offsets[start] : offsets[end]] for name, values in self.tokens.items()},
                {name: values[start:end] for name, values in self.per_sample.items()},
            )
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def padded(self, name: str, fill: float = 0, length: int | None = None) -> np.ndarray:
        """Return a token field as ``[samples, length, ...]``, padded on the right with ``fill``."""
        width = int(self.lengths.max(initial=0)) if length is None else length
        values = self.tokens[name]
        out = np.full((len(self), width, *values.shape[1:]), fill, dtype=values.dtype)
        offsets = self.offsets.tolist()
        for row, start, end in zip(out, offsets, offsets[1:], strict=False):
            row[: end - start] = values[start:end]
        return out


def joined_routing(turns: Sequence[np.ndarray | None], length: int) -> np.ndarray | None:
    """Return the `Sample.routed_experts` of ``length`` tokens; None if one turn has none.

    ``turns``: the experts of each turn's prompt and response but for its last token, ``[tokens, layers, top_k]``. Each
    prompt begins with all tokens of the turns before, whose own records, made when they were sampled, are kept.
    """
    whole, known = None, 0
    for routed in turns:
        if routed is None:
            return None
        if whole is None:
            whole = np.zeros((length, *routed.shape[1:]), dtype=routed.dtype)
        whole[known : len(routed)] = routed[known:]
        known = len(routed)
    return whole


def _of_pictures(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the stacked ``latents`` (and ``means``) of pictures, which all have the same number of steps; empty for
    other samples."""
    found: dict[str, np.ndarray] = {}
    for name in ("latents", "means"):
        values = [vars(sample)[name] for sample in samples if vars(sample)[name] is not None]
        found |= {name: np.stack(values)} if values else {}
    return found


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """Derive the seed of a named part of a run.

    ``derive_seed(seed, group_id, sample_index, turn)`` is the seed of one request. Different parts give unrelated
    seeds; ``1`` and ``"1"`` are different parts.

    Returns an integer in ``[0, 2**63)``. Raises `TypeError` for a part that is neither an integer nor text.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (run_seed, *parts):
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a seed derives from integers and texts, not from {part!r}")
        kind = "i" if isinstance(part, int) else "s"
        encoded = str(part).encode(errors="surrogatepass")
        digest.update(f"{kind}{len(encoded)}:".encode() + encoded)
    return int.from_bytes(digest.digest(), "big") >> 1
