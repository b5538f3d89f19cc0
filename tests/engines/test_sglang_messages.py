"""What SGLang's server is sent and what it answers, without a server: bodies, events, messages, checkpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from roll.engines.base import EngineFailed, EngineLoad
from roll.engines.process_engine import Response
from roll.engines.sglang import strategy as sglang
from roll.engines.sglang.server import CallRefused, SGLangServer, server_environment
from roll.engines.sglang.strategy import (
    MemoryCheckpoint,
    SGLangInferStrategy,
    add_loads,
    check_recordable,
    checksum_of_values,
    generate_body,
    names_to_read,
    score_body,
    scores_of,
    take_message,
)
from roll.weights.buckets import pack_buckets, tensor_checksum
from tests.engines.vllm_helpers import request


def body_of(**sampling):
    return generate_body(request("a", 50, **sampling), "roll-1", 3, (95,), 40)


def message(tokens, count, reason=None, **told):
    told = {
        "finish_reason": reason,
        "completion_tokens": count,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5 * token, token, None] for token in tokens],
    } | told
    return {"output_ids": tokens, "meta_info": told}


def response_to(**sampling) -> Response:
    return Response(request("a", 50, **sampling), "roll-1", None)


def test_a_request_travels_with_its_own_limits_seed_and_cache():
    body = body_of(temperature=0.7, seed=11, stop_token_ids=(3,))
    assert body["input_ids"] == [5, 6, 7] and body["rid"] == "roll-1" and body["stream"] is True
    assert body["cache_salt"] != generate_body(request("a"), "roll-1", 4, (), 40)["cache_salt"]
    assert body["return_logprob"] is True and body["return_sampling_mask"] is False
    assert body["sampling_params"] == {
        "max_new_tokens": 37,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "sampling_seed": 11,
        "ignore_eos": False,
        "stop_token_ids": [95, 3],
        "stream_interval": 8,
    }
    assert json.loads(json.dumps(body)) == body


def test_a_continued_request_keeps_its_seed_and_one_with_stop_strings_hears_of_each_token():
    assert body_of(seed=11, first_token_index=2)["sampling_params"]["sampling_seed"] == 11
    assert body_of(stop_strings=("x",))["sampling_params"]["stream_interval"] == 1
    assert body_of(ignore_eos=True, stop_token_ids=(3,))["sampling_params"]["stop_token_ids"] == []


def test_a_truncated_distribution_is_recorded_by_its_mask_and_a_point_by_nothing():
    for sampling in (dict(top_k=9), dict(top_k=9, top_p=0.5)):
        body = body_of(**sampling)
        assert body["return_sampling_mask"] and not body["return_logprob"]
    assert not body_of(top_k=1, top_p=0.5)["return_sampling_mask"]
    assert not body_of(temperature=0.0, top_p=0.5)["return_sampling_mask"]


@pytest.mark.parametrize("sampling", [dict(top_p=0.9), dict(top_k=101), dict(temperature=1e-7)])
def test_parameters_whose_distribution_sglang_does_not_tell_are_refused(sampling):
    with pytest.raises(ValueError, match="'a' cannot run: SGLang"):
        check_recordable(request("a", **sampling), 100)


@pytest.mark.parametrize(
    "sampling", [dict(), dict(top_k=100, top_p=0.9), dict(top_k=1), dict(temperature=0.0, top_p=0.9, top_k=101)]
)
def test_parameters_whose_distribution_sglang_tells_are_let_through(sampling):
    check_recordable(request("a", **sampling), 100)


@pytest.mark.parametrize(("told", "share"), [({"cached_tokens": 1}, 1), ({"cached_tokens": 10_000}, None), ({}, 0)])
def test_of_a_prompt_no_more_is_shared_than_it_has(told, share):
    strategy, response = object.__new__(SGLangInferStrategy), response_to()
    strategy._load_totals = EngineLoad()
    assert strategy._take(response, message([9], 1, {"type": "stop", "matched": 9}, **told), 50)
    prompt = len(response.request.prompt_token_ids)
    load = strategy._load_totals
    assert (load.prompt_tokens, load.shared_tokens) == (prompt, prompt if share is None else share)


def test_loads_add_up_over_readings_and_schedulers():
    load = EngineLoad()
    add_loads(load, {"loads": []})
    assert load == EngineLoad(), "before the first step there is nothing to count"
    told = [{"num_running_reqs": number, "num_waiting_reqs": 5, "token_usage": number / 4} for number in (1, 2)]
    add_loads(load, {"loads": told})
    add_loads(load, {"loads": told[:1]})
    assert (load.steps, load.running, load.waiting, load.cache_use) == (2, 4, 15, 0.375 + 0.25)


def test_a_reading_of_the_load_that_fails_is_not_the_last_one(monkeypatch):
    monkeypatch.setattr(sglang, "_LOAD_SECONDS", 0.001)
    answers = [CallRefused("busy"), EngineFailed("gone"), {"loads": []}]
    asked: list[str] = []

    async def call(path):
        asked.append(path)
        if len(answers) == 1:
            return answers[0]
        raise answers.pop(0)

    async def scenario():
        strategy = SGLangInferStrategy(
            "unused", device="cpu", dtype="float32", attn_implementation="sdpa", max_length=64, strategy_config={}
        )
        strategy._load_totals, strategy._requests = EngineLoad(), SimpleNamespace(inside={"a": None})
        reading = asyncio.create_task(strategy._read_loads(SimpleNamespace(call=call)))
        while len(asked) < 4 and not reading.done():
            await asyncio.sleep(0.001)
        reading.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert asked[:4] == ["/v1/loads"] * 4


def test_messages_add_up_and_the_last_one_tells_the_versions():
    response = response_to()
    assert take_message(response, message([1, 2], 2)) is False
    take_message(response, message([3], 3, weight_version="5"))
    assert response.versions == [4, 4, 4], "held back tokens count as older"
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 4}]
    take_message(response, message([9], 4, {"type": "stop", "matched": 9}, weight_version="5", weight_versions=spans))
    completion = response.completion()
    assert completion.token_ids.tolist() == [1, 2, 3, 9] and completion.versions.tolist() == [4, 4, 5, 5]
    np.testing.assert_allclose(completion.logprobs, [-0.5, -1.0, -1.5, -4.5])
    assert completion.finish_reason == "stop"


def test_a_truncated_distribution_takes_the_masks_logprobs():
    response = response_to(top_k=5)
    take_message(response, message([1, 2], 2, output_token_sampling_logprobs=[-0.1, -0.2]))
    np.testing.assert_allclose(response.chunk(0).logprobs, [-0.1, -0.2])


def test_greedy_tokens_are_certain_whatever_sglang_says():
    response = response_to(temperature=0.0)
    take_message(response, message([1, 2], 2, output_token_logprobs=[[-0.5, 1, None], [None, 2, None]]))
    assert response.chunk(0).logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        (message([1], 3), EngineFailed, "counts 3 tokens"),
        (message([1], 1, output_token_logprobs=[]), EngineFailed, "0 log-probabilities for 1 tokens"),
        (message([1], 1, output_token_logprobs=[[None, 1, None]]), EngineFailed, "NaN"),
        (message([1], 1, output_token_logprobs=[[float("nan"), 1, None]]), EngineFailed, "NaN"),
        (message([1], 1, {"type": "stop", "matched": "NaN happened"}), EngineFailed, "NaN"),
        (message([1], 1, {"type": "odd"}), EngineFailed, "'odd'"),
        (message([], 0, {"type": "abort", "message": "no memory"}), ValueError, "given up by SGLang: no memory"),
        ({"error": {"message": "too long"}}, ValueError, "'a' cannot run: too long"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(told, error, words):
    with pytest.raises(error, match=words):
        take_message(response_to(), told)


def test_versions_that_do_not_cover_the_tokens_are_refused():
    spans = [{"version": "4", "start": 0, "end": 1}]
    with pytest.raises(EngineFailed, match="1 tokens out of 2"):
        take_message(response_to(), message([1, 2], 2, {"type": "length"}, weight_versions=spans))


def test_scores_are_those_of_the_tokens_that_were_sent():
    tokens = np.array([5, 6, 7], dtype=np.int32)
    body = score_body(tokens, "roll-2")
    assert body["logprob_start_len"] == 0 and body["sampling_params"]["temperature"] == 1.0
    reply = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.5, 6, None], [-2.5, 7, None]]}}
    scores = scores_of(reply, tokens)
    assert scores.dtype == np.float32 and scores.tolist() == [0.0, -1.5, -2.5]
    with pytest.raises(EngineFailed, match="scored 3 tokens"):
        scores_of(reply, tokens[:2])


@pytest.mark.needs("aiohttp")
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("end", ["data: [DONE]\n\n", 'data: {"b"', ""])
def test_events_are_put_together_from_pieces_of_any_size_and_an_answer_that_breaks_off_is_no_end(size, end):
    import aiohttp
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    data = f'data: {{"a": 1}}\n\n: comment\n\ndata: {{"a": "ä"}}\n\n{end}'.encode()

    async def answer(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(data), size):
            await response.write(data[start : start + size])
        return response

    async def scenario():
        app = web.Application()
        app.router.add_post("/generate", answer)
        events = []
        async with TestServer(app) as served, aiohttp.ClientSession(served.make_url("/")) as session:
            try:
                async for event in SGLangServer(None, session).stream("/generate", {}):
                    events.append(event)
            except EngineFailed as failure:
                return events, str(failure)
        return events, None

    events, failure = asyncio.run(scenario())
    assert events == [{"a": 1}, {"a": "ä"}]
    assert failure == (None if "DONE" in end else "SGLang's answer to /generate broke off")


def test_the_server_finds_this_package_and_tells_processed_logprobs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    environment = server_environment()
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"
    assert environment["PYTHONPATH"].split(":")[1:] == ["/elsewhere"]
    assert (Path(environment["PYTHONPATH"].split(":")[0]) / "roll" / "engines").is_dir()


def test_a_publication_becomes_a_checkpoint_that_safetensors_reads():
    tensors = {
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "wide": torch.randn(5, 7),
        "half": torch.randn(2, 3, dtype=torch.float16),
        "last": torch.randn(40),
    }
    checkpoint = MemoryCheckpoint(list(pack_buckets(tensors.items(), 200)))
    files = sorted(Path(checkpoint.path).glob("*.safetensors"))
    assert len(files) > 1
    read = {}
    for path in files:
        with safe_open(path, "pt") as file:
            read |= {name: file.get_tensor(name) for name in file.keys()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)
    checkpoint.close()
    checkpoint.close()
    assert not Path(checkpoint.path).exists()


def test_small_tensors_are_read_back_other_ones_at_each_version():
    layout = {f"norm.{index}": ("bfloat16", (64,)) for index in range(40)}
    layout |= {"embedding": ("bfloat16", (1000, 64)), "scale": ("float32", ())}
    first, second = names_to_read(layout, 1), names_to_read(layout, 2)
    assert len(first) == 8 and first != second and first == names_to_read(layout, 1)
    assert all(name.startswith("norm") for name in first + second)


def test_numbers_read_back_give_the_checksum_of_the_bytes_and_a_part_gives_none():
    tensor = torch.randn(4, 3).to(torch.bfloat16)
    values = tensor.float().tolist()
    assert checksum_of_values(values, "bfloat16", (4, 3)) == tensor_checksum(tensor)
    assert checksum_of_values(values, "bfloat16", (8, 3)) is None
