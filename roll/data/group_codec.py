"""Lossless conversion of groups to bytes and back, so that finished rollouts outlive the process that made them.

A JSON header holds everything but the arrays, which follow it. Nothing is ever unpickled. The fields of a prompt that
only scoring needs (ground truth, metadata: any objects; messages) are left out, since a finished group has been scored.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from roll.data.records import Group, Prompt, Sample

_HEADER = struct.Struct("<Q")
_ARRAYS = (
    "token_ids",
    "response_mask",
    "behaviour_logprobs",
    "versions",
    "turns",
    "turn_rewards",
    "turn_states",
)
_PLAIN = ("finish_reason", "response_text", "score", "reward", "metrics", "episode")


def encode_group(group: Group) -> bytes:
    """Return the bytes of a finished group."""
    arrays: list[np.ndarray] = []

    def place(array: np.ndarray | None) -> dict[str, Any] | None:
        if array is None:
            return None
        arrays.append(np.ascontiguousarray(array))
        return {"dtype": array.dtype.str, "length": len(array)}

    prompt = group.prompt
    header = {
        "group_id": group.group_id,
        "baseline_score": group.baseline_score,
        "baseline_version": group.baseline_version,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "domain": prompt.domain,
            "token_ids": place(prompt.token_ids),
            "text": prompt.text,
        },
        "samples": [
            {name: place(getattr(sample, name)) for name in _ARRAYS}
            | {name: getattr(sample, name) for name in _PLAIN}
            for sample in group.samples
        ],
    }
    text = json.dumps(header, default=float).encode()  # `default` converts numpy's numbers
    return b"".join([_HEADER.pack(len(text)), text, *(array.tobytes() for array in arrays)])


def decode_group(data: bytes) -> Group:
    """Return the group that `encode_group` received. Raises `ValueError` for other bytes."""
    if len(data) < _HEADER.size:
        raise ValueError("these bytes are no group")
    (size,) = _HEADER.unpack_from(data)
    header = json.loads(data[_HEADER.size : _HEADER.size + size])
    offset = _HEADER.size + size

    def take(form: dict[str, Any] | None) -> np.ndarray | None:
        nonlocal offset
        if form is None:
            return None
        array = np.frombuffer(data, dtype=np.dtype(form["dtype"]), count=form["length"], offset=offset).copy()
        offset += array.nbytes
        return array

    prompt = header["prompt"] | {"token_ids": take(header["prompt"]["token_ids"])}
    samples = []
    for sample in header["samples"]:
        values: dict[str, Any] = {name: take(sample[name]) for name in _ARRAYS}
        samples.append(Sample(**values, **{name: sample[name] for name in _PLAIN}))
    if offset != len(data):
        raise ValueError(f"a group of {offset} bytes cannot have {len(data)}")
    baseline = {name: header[name] for name in ("baseline_score", "baseline_version")}
    return Group(header["group_id"], Prompt(**prompt), samples, **baseline)
