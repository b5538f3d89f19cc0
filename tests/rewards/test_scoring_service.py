"""A scoring service gets batches of pictures; what it does wrong is healed, or named."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import socket
import threading
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from roll.configs.errors import ConfigError
from roll.configs.rewards import RewardConfig
from roll.rewards import http
from roll.rewards.base import RewardGaveUp, RewardInput
from roll.rewards.registry import check_machine, check_sight, resolve_verifier
from tests.rewards.chat_server import Answer, chat_server

SERVER = Path(__file__).parents[2] / "examples" / "scoring_service.py"
KEY = "sk-very-secret"


def scores(*values) -> Answer:
    return Answer(body=json.dumps({"scores": values}))


def red(level: int) -> RewardInput:
    """A picture that is told from others by how red it is."""
    return RewardInput("0", f"red {level}", "", image=Image.new("RGB", (4, 4), (level, 0, 0)))


def pictures(request) -> list[tuple[str, int]]:
    """Prompt and redness of each picture in a request."""
    decoded = [Image.open(io.BytesIO(base64.b64decode(image))) for image in request["images"]]
    assert all(image.format == "PNG" for image in decoded)
    return [(prompt, image.getpixel((0, 0))[0]) for prompt, image in zip(request["prompts"], decoded, strict=True)]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.001)


def verifier(url: str, weights: dict[str, float] | None = None, **arguments):
    config = RewardConfig(verifier="scoring_service", verifier_args={"url": url, **arguments}, weights=weights or {})
    return resolve_verifier(config, "rewards.taste")


def ask(url: str, levels, **arguments) -> list:
    """The numbers of each picture, or its error; all are there at once."""

    async def main() -> list:
        judge = verifier(url, **arguments)
        try:
            return await asyncio.gather(*(judge(red(level)) for level in levels), return_exceptions=True)
        finally:
            await judge.prepared.close()

    return asyncio.run(main())


def test_pictures_that_wait_share_a_request_and_each_gets_its_own_score():
    with chat_server(scores(0, 1), scores(2, 3), scores({"score": 4, "taste": 0.5})) as server:
        found = ask(f"{server.base_url}/chat/completions", range(5), batch_size=2, max_requests=1)
    assert [pictures(request) for request in server.requests] == [
        [("red 0", 0), ("red 1", 1)],
        [("red 2", 2), ("red 3", 3)],
        [("red 4", 4)],
    ]
    assert [each["score"] for each in found] == [0, 1, 2, 3, 4]
    assert [each["scoring_batch"] for each in found] == [2, 2, 2, 2, 1] and found[4]["taste"] == 0.5
    assert all(each["scoring_retries"] == 0 for each in found)


def test_a_picture_is_sent_when_it_is_there_while_others_are_under_way():
    both = threading.Barrier(2)
    with chat_server(scores(7), on_chat=lambda: both.wait(20)) as server:

        async def main() -> list:
            judge = verifier(f"{server.base_url}/chat/completions", max_requests=2)
            first = asyncio.ensure_future(judge(red(1)))
            while not judge.prepared._senders:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            try:
                return await asyncio.gather(first, judge(red(2)))
            finally:
                await judge.prepared.close()

        found = asyncio.run(main())
    assert [each["scoring_batch"] for each in found] == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (scores(1), "1 scores for 2 pictures"),
        (scores(1, 2, 3), "3 scores for 2 pictures"),
        (Answer(body='{"scores": [1, NaN]}'), "'nan' is no finite number"),
        (Answer(body='{"scores": [1, 1e999]}'), "'inf' is no finite number"),
        (scores(1, 10**400), "'1000000000000000000000000000000000000000' is no finite number"),
        (scores(1, "2"), "'2' is no finite number"),
        (scores(1, None), "'None' is no finite number"),
        (scores({"score": 1}, {"score": True}), "'True' is no finite number"),
        (Answer(body='{"score": [1, 2]}'), "no list of `scores`"),
        (Answer(body="<html>"), "no JSON object"),
        (Answer(status=503, body="busy"), "503"),
        (Answer(hang=True), "no answer within 0.3 s"),
    ],
)
def test_a_service_that_hangs_or_lies_is_asked_again_and_then_named(wrong, named):
    limits = {"request_timeout_seconds": 0.3, "request_retries": 1}
    with chat_server(wrong, scores(1, 2)) as server:
        healed = ask(f"{server.base_url}/chat/completions", range(2), **limits)
        assert [(each["score"], each["scoring_retries"]) for each in healed] == [(1, 1), (2, 1)]
    with chat_server(wrong) as server:
        url = f"{server.base_url}/chat/completions"
        for error in ask(url, range(2), **limits):
            assert isinstance(error, RewardGaveUp)
            assert url in str(error) and "2 attempts" in str(error) and named in str(error)


def test_a_service_that_is_gone_is_named_and_one_that_comes_back_scores():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/score"
        (error,) = ask(url, [1], request_retries=1)
    assert isinstance(error, RewardGaveUp) and url in str(error) and "Connect" in str(error)


def test_one_picture_that_is_refused_fails_alone():
    with chat_server(Answer(status=400, body="bad picture"), scores(1), Answer(status=400), scores(3)) as server:
        first, second, third = ask(f"{server.base_url}/chat/completions", [1, 2, 3])
    assert (first["score"], third["score"]) == (1, 3) and isinstance(second, RewardGaveUp)
    with chat_server(Answer(status=401, body=f"wrong key {KEY}")) as server:
        assert all(isinstance(each, RewardGaveUp) for each in ask(f"{server.base_url}/chat/completions", [1, 2]))
    assert len(server.requests) == 1, "no picture is the cause of that"


def test_a_picture_whose_time_is_up_is_not_sent_and_the_others_are_scored():
    free = threading.Event()
    with chat_server(scores(1), scores(3), on_chat=lambda: free.wait(20)) as server:

        async def main() -> list:
            judge = verifier(f"{server.base_url}/chat/completions", max_requests=1)
            tasks = [asyncio.ensure_future(judge(red(level))) for level in (1,)]
            while not server_is_asked(judge):
                await asyncio.sleep(0)
            tasks += [asyncio.ensure_future(judge(red(level))) for level in (2, 3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            free.set()
            try:
                return await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await judge.prepared.close()

        first, second, third = asyncio.run(main())
    assert (first["score"], third["score"]) == (1, 3) and isinstance(second, asyncio.CancelledError)
    assert [pictures(request) for request in server.requests] == [[("red 1", 1)], [("red 3", 3)]]


def test_a_picture_that_comes_as_a_request_ends_is_sent():
    with chat_server(scores(1), scores(2)) as server:

        async def main() -> list:
            service = verifier(f"{server.base_url}/chat/completions", max_requests=1).prepared
            try:
                async with asyncio.timeout(5):
                    return [(await service(red(level).image, "red"))["score"] for level in (1, 2)]
            finally:
                await service.close()

        assert asyncio.run(main()) == [1, 2]


def server_is_asked(judge) -> bool:
    return bool(judge.prepared._senders) and not judge.prepared._waiting


def test_the_key_is_sent_and_named_to_the_processes_and_in_no_message(monkeypatch):
    monkeypatch.setenv("TASTE_KEY", KEY)
    with chat_server(Answer(status=403, body=f"no {KEY}")) as server:
        url = f"{server.base_url}/chat/completions"
        (error,) = ask(url, [1], api_key_env="TASTE_KEY")
        assert server.keys == [f"Bearer {KEY}"] and "no ***" in str(error) and KEY not in str(error)
        assert verifier(url, api_key_env="TASTE_KEY").secrets == ("TASTE_KEY",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": "127.0.0.1:80"}, "no address"),
        ({"url": "http://me:word@h/score"}, "`api_key_env`"),
        ({"api_key_env": "NOT_SET_IN_TESTS"}, "`export` it"),
        ({"request_timeout_seconds": 601}, "more than the 600 s"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_requests": 0}, "max_requests"),
        ({"request_retries": -1}, "request_retries"),
        ({"request_timeout_seconds": 0}, "request_timeout_seconds"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_a_run(arguments, words):
    with pytest.raises(ConfigError, match=words):
        verifier(**{"url": "http://127.0.0.1:1/score", **arguments})


def test_before_a_run_the_service_has_to_score_a_picture():
    with chat_server(scores(1), Answer(body='{"scores": []}')) as server:
        judge = verifier(f"{server.base_url}/chat/completions")
        check_sight(judge, True, "rewards.taste")
        check_machine(judge, "rewards.taste")
        with pytest.raises(ConfigError, match="0 scores for 1 pictures"):
            check_machine(judge, "rewards.taste")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"score": 1.0, "taste": 0.5, "beauti": 1.0}, r"(?s)rewards.taste.weights.beauti: .*did you mean `beauty`\?"),
        (
            {},
            r"(?s)rewards.taste.verifier: .*without a `score`, only with `beauty`.*`rewards.taste.weights: \{NAME",
        ),
    ],
)
def test_a_number_that_the_service_does_not_answer_with_is_found_before_a_run(weights, words):
    answer = {name: 1.0 for name in (*weights, "beauty") if name != "beauti"}
    with chat_server(scores(answer)) as server:
        url = f"{server.base_url}/chat/completions"
        check_machine(verifier(url, {"beauty": 2.0}), "rewards.taste")
        with pytest.raises(ConfigError, match=words):
            check_machine(verifier(url, weights), "rewards.taste")


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scoring_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_clip(folder: Path) -> None:
    """Write a CLIP model with random weights that knows its prompts by their letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        CLIPConfig,
        CLIPImageProcessor,
        CLIPModel,
        CLIPProcessor,
        PreTrainedTokenizerFast,
        set_seed,
    )

    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<begin>", "<end>", *letters])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = [("<begin>", 1), ("<end>", 2)]
    plain.post_processor = processors.TemplateProcessing(single="<begin> $A <end>", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<begin>", eos_token="<end>", model_max_length=32
    )
    set_seed(1)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": len(vocabulary), "max_position_embeddings": 32, "pad_token_id": 0}
    config = CLIPConfig(
        text_config={**text, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    CLIPProcessor(CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size), tokenizer).save_pretrained(folder)


def test_the_example_server_scores_pictures_with_a_clip_model(tmp_path):
    make_clip(tmp_path)
    module = example()
    scorer = module.ClipScorer(str(tmp_path), None, "cpu", "float32")
    server = module.make_server(scorer, "127.0.0.1", 0)
    server.RequestHandlerClass.log_message = lambda *arguments: None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/score"
        found = ask(url, [0, 120, 250], batch_size=2)
        check_machine(verifier(url), "rewards.taste")
        direct = [scorer([f"red {level}"], [red(level).image])[0] for level in (0, 120, 250)]
    finally:
        server.shutdown()
        server.server_close()
    assert [each["score"] for each in found] == pytest.approx(direct, abs=1e-4)
    assert len({round(score, 3) for score in direct}) == 3


@pytest.mark.parametrize(
    "request_", [{}, [], {"prompts": ["a"], "images": []}, {"prompts": ["a"], "images": ["!"]}, {"prompts": [1]}]
)
def test_the_example_server_refuses_what_is_no_request(request_):
    with pytest.raises(ValueError, match="."):
        example().decoded(request_)
