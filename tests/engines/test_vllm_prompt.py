"""Prompts with pictures, as vLLM gets them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from roll.data.pictures import decoded, read_picture
from roll.engines.base import GenerateRequest, SamplingParams
from roll.engines.process_engine import Response
from roll.engines.vllm.strategy import VLLMInferStrategy
from tests.tiny_vision import draw, make_model

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("vllm")]  # importing vLLM takes ten seconds


@pytest.fixture
def engine(tmp_path) -> VLLMInferStrategy:
    model = make_model(tmp_path / "model")
    facts = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa", "max_length": 40}
    return VLLMInferStrategy(model, strategy_config={}, **facts)


def request_of(engine: VLLMInferStrategy, tmp_path) -> GenerateRequest:
    small, wide = draw(np.eye(2, dtype=bool)), draw(np.ones((2, 2), bool)).resize((32, 16))
    pictures = tuple(read_picture(image, tmp_path) for image in (small, wide))
    token_ids = engine._processor.expanded(np.array([8, 5, 9, 5, 10], np.int32), pictures)
    return GenerateRequest("r", token_ids, SamplingParams(3), prompt_pictures=pictures)


def test_vllm_gets_one_placeholder_for_each_picture_and_the_pictures_in_order(engine, tmp_path):
    request = request_of(engine, tmp_path)
    prompt = engine._prompt(request, [decoded(picture) for picture in request.prompt_pictures])
    assert len(request.prompt_token_ids) == 3 + 4 + 8
    assert prompt["prompt_token_ids"] == [8, 5, 9, 5, 10]
    assert [image.size for image in prompt["multi_modal_data"]["image"]] == [(16, 16), (32, 16)]
    from vllm.inputs import TokensPrompt

    assert prompt.keys() <= TokensPrompt.__annotations__.keys()


def test_a_picture_is_looked_at_again_with_new_weights(engine, tmp_path):
    """vLLM keeps what its vision tower made of a picture under the picture's id, also across a pause with ``keep``."""
    request = request_of(engine, tmp_path)
    first, again = (engine._prompt(request, []) for _ in range(2))
    engine._loads += 1
    later = engine._prompt(request, [])
    ids = [prompt["multi_modal_uuids"]["image"] for prompt in (first, again, later)]
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4
    assert first["cache_salt"] == again["cache_salt"] != later["cache_salt"]


class Asked:
    """`AsyncLLM` as far as a request goes: keeps the prompts, and ends each at once."""

    def __init__(self) -> None:
        self.prompts: list[dict] = []

    async def generate(self, prompt, params, request_id, lora_request=None):
        from vllm.outputs import CompletionOutput

        self.prompts.append(prompt)
        yield SimpleNamespace(outputs=[CompletionOutput(0, "", [], None, None, finish_reason="stop")])


async def run(engine, response) -> list[Response]:
    return [each async for each in engine._updates(response)]


def test_the_samples_of_a_group_share_each_decoded_picture(engine, tmp_path):
    engine._engine = asked = Asked()
    engine._end_tokens = ()
    request = request_of(engine, tmp_path)

    async def group():
        await asyncio.gather(*(run(engine, Response(request, f"roll-{each}", None)) for each in range(3)))

    asyncio.run(group())
    first, *others = (prompt["multi_modal_data"]["image"] for prompt in asked.prompts)
    assert len(others) == 2 and first[0].size != first[1].size
    assert all(one is other for images in others for one, other in zip(first, images, strict=True))


def test_what_happens_while_a_picture_is_decoded_is_noticed(engine, tmp_path):
    """An aborted request never reaches vLLM, and the prompt of another names the weights that it begins with."""
    engine._engine = asked = Asked()
    engine._end_tokens = ()
    aborted, other = (Response(request_of(engine, tmp_path), name, None) for name in ("roll-1", "roll-2"))

    async def both():
        tasks = [asyncio.create_task(run(engine, response)) for response in (aborted, other)]
        await asyncio.sleep(0)
        aborted.aborted = True
        engine._loads += 1
        return await asyncio.gather(*tasks)

    nothing, (ended,) = asyncio.run(both())
    assert nothing == [] and ended.finish_reason == "stop"
    (prompt,) = asked.prompts
    assert prompt["cache_salt"] == "weights 1"
