"""One group's rollout and the validation, with an engine and a judge that do as they are told."""

import asyncio
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from roll.algorithms.routing import RoutingShape
from roll.data.records import Group, Prompt, Sample, SampleBatch
from roll.engines.base import Completion, SamplingParams
from roll.pipeline.algorithm import StalenessViolation, TrainingBatch
from roll.pipeline.context import SAMPLES_A_TURN, paced
from roll.pipeline.preflight import _weight_problems
from roll.pipeline.rlvr import PromptValidator, RolloutFunction, sample_from_completion
from roll.pipeline.rollouts import MixedVersions
from roll.pipeline.stages import SAMPLES_FREED_A_TURN, StepGroups, record
from roll.pipeline.stages import rollout as rollout_stage
from roll.rewards.base import RewardOutput
from roll.rollout.buffer import FinishedGroup
from roll.rollout.clock import run_virtual
from roll.rollout.ledger import Ledger
from roll.rollout.scheduler import GroupRequest
from roll.runtime.pool import Pace
from roll.tracking.waits import WaitBoard


class Engine:
    """Answers with as many tokens as were asked for, of the versions it is given, after ``seconds``."""

    def __init__(self, seconds=1.0, versions=(5,)):
        self.seconds, self.versions = seconds, versions
        self.requests, self.running, self.most = [], 0, 0
        self.sticky = Counter()

    async def generate(self, request, *, sticky_key=None, min_version=None):
        self.requests.append((request, min_version))
        if sticky_key is not None:
            self.sticky[sticky_key] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        count = request.sampling.max_new_tokens
        versions = np.resize(np.array(self.versions), count)
        return Completion(request.request_id, np.arange(count), np.full(count, -0.5), versions, "length")

    def forget(self, sticky_key):
        del self.sticky[sticky_key]


class Judge:
    async def score(self, domain, records):
        if any(record.prompt_text == "bad" for record in records):
            raise RuntimeError("cannot be judged")
        return [RewardOutput(float(index)) for index, _ in enumerate(records)]


class Decoder:
    def decode(self, token_ids, skip_special_tokens=True):
        return " ".join(map(str, token_ids))


def prompt(text="2+2", domain="sums"):
    return Prompt(text, domain, np.array([7, 8], dtype=np.int32), text)


def rollout(engine, **changes):
    function = RolloutFunction(engine, Judge(), Decoder(), SamplingParams(max_new_tokens=3), 4, 1, "train")
    return replace(function, **changes)


def test_a_group_has_its_samples_in_order_each_with_its_own_seed_and_name():
    async def scenario():
        engine = Engine()
        group = await rollout(engine)(9, prompt(), min_version=5)
        assert group.scores.tolist() == [0, 1, 2, 3]
        assert [request.request_id for request, _ in engine.requests] == [f"train-9-{index}" for index in range(4)]
        assert len({request.sampling.seed for request, _ in engine.requests}) == 4
        assert {minimum for _, minimum in engine.requests} == {5}
        assert group.samples[0].response_mask.tolist() == [False, False, True, True, True]
        assert group.samples[0].versions.tolist() == [-1, -1, 5, 5, 5]
        assert group.times["generated"] <= time.time()

    run_virtual(scenario())


def test_a_weight_in_the_row_of_a_prompt_goes_to_its_samples_unless_the_verifier_has_one():
    class Weighing:
        async def score(self, domain, records):
            return [RewardOutput(1.0, {"weight": 3.0} if index else {}) for index, _ in enumerate(records)]

    async def scenario():
        row = replace(prompt(), metadata={"weight": 2})
        given = await rollout(Engine(), judge=Weighing(), sample_weight="weight")(9, row, min_version=5)
        assert [sample.metrics for sample in given.samples] == [{"weight": 2.0}] + [{"weight": 3.0}] * 3
        bare = await rollout(Engine(), judge=Weighing(), sample_weight="weight")(9, prompt(), min_version=5)
        assert bare.samples[0].metrics == {}
        ignored = await rollout(Engine(), judge=Weighing())(9, row, min_version=5)
        assert ignored.samples[0].metrics == {}

    run_virtual(scenario())


@pytest.mark.parametrize("weight", [-1, "much", float("nan")])
def test_a_row_whose_weight_cannot_be_one_is_a_problem(weight):
    rows = [prompt(), replace(prompt(), metadata={"weight": 0}), replace(prompt("3+3"), metadata={"weight": weight})]
    (found,) = _weight_problems("weight", rows)
    assert found.path == "sample_weight" and "prompt 3+3 has the weight" in found.message
    assert not list(_weight_problems("weight", rows[:2])) and not list(_weight_problems(None, rows))


def test_a_greedy_baseline_is_generated_judged_and_not_trained_on():
    async def scenario():
        engine = Engine()
        sampling = SamplingParams(max_new_tokens=3, temperature=0.7, top_p=0.9, top_k=5)
        group = await rollout(engine, greedy_baseline=True, sampling=sampling)(9, prompt(), min_version=5)
        assert group.scores.tolist() == [0, 1, 2, 3] and group.baseline_score == 4
        *sampled, greedy = [request.sampling for request, _ in engine.requests]
        assert [(each.temperature, each.top_p, each.top_k) for each in sampled] == [(0.7, 0.9, 5)] * 4
        assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)
        assert len({request.request_id for request, _ in engine.requests}) == 5

    run_virtual(scenario())


@pytest.mark.parametrize("text", ["2+2", "bad"])
def test_samples_that_stay_together_leave_nothing_in_the_router(text):
    async def scenario():
        engine = Engine()
        try:
            await rollout(engine, separate_requests=False)(9, prompt(text))
        except RuntimeError:
            assert text == "bad"
        assert not engine.sticky and len(engine.requests) == 4

    run_virtual(scenario())


def test_samples_that_stay_together_are_let_go_before_they_are_judged():
    class Looks(Judge):
        async def score(self, domain, records):
            assert engine.requests and not engine.sticky
            return await super().score(domain, records)

    engine = Engine()
    run_virtual(rollout(engine, judge=Looks(), separate_requests=False)(9, prompt()))


def validator(engine, prompts, **settings):
    options = {"batch_size": 8, "timeout_seconds": 100.0, "attempts": 3, "on_event": print, **settings}
    return PromptValidator(prompts, rollout(engine, purpose="validation"), **options)


def test_validation_keeps_to_its_budget_and_reports_each_domain():
    async def scenario():
        engine = Engine()
        prompts = [prompt(f"{index}", domain) for domain in ("sums", "products") for index in range(5)]
        result = await validator(engine, prompts).run(5)
        assert engine.most == 8
        assert result.metrics["val/sums/accuracy"] == result.metrics["val/products/accuracy"] == 1.5
        assert result.metrics["val/sums/best_of_group"] == 3
        assert [group.prompt.text for group in result.groups] == [each.text for each in prompts]

    run_virtual(scenario())


class Stumbling(Judge):
    """Fails a prompt the first time, and those named "bad" each time."""

    def __init__(self):
        self.seen = Counter()

    async def score(self, domain, records):
        self.seen[records[0].prompt_text] += 1
        if self.seen[records[0].prompt_text] == 1:
            raise OSError("the service is down")
        return await super().score(domain, records)


def test_a_validation_tries_what_failed_again_and_leaves_out_and_reports_what_keeps_failing():
    async def scenario():
        events, judge = [], Stumbling()
        prompts = [prompt("1"), prompt("bad"), prompt("2"), prompt("bad", "proofs")]
        measured = replace(validator(Engine(), prompts, on_event=events.append), rollout=rollout(Engine(), judge=judge))
        result = await measured.run(5)
        assert [group.prompt.text for group in result.groups] == ["1", "2"]
        assert judge.seen["1"] == judge.seen["2"] == 2 and judge.seen["bad"] == 6
        assert result.metrics["val/sums/failed_groups"] == result.metrics["val/proofs/failed_groups"] == 1
        assert result.metrics["val/sums/accuracy"] == 1.5 and "val/proofs/accuracy" not in result.metrics
        assert events == ["validation: 2 of 4 groups failed; the first: cannot be judged"]

    run_virtual(scenario())


def test_a_validation_of_which_nothing_could_be_judged_fails():
    async def scenario():
        with pytest.raises(RuntimeError, match="cannot be judged"):
            await validator(Engine(), [prompt("bad")] * 3).run(5)

    run_virtual(scenario())


def test_validation_that_saw_another_version_is_an_error():
    async def scenario():
        with pytest.raises(MixedVersions, match=r"version 5 saw tokens of versions \[5, 6\]"):
            await validator(Engine(versions=(5, 6)), [prompt()]).run(5)

    run_virtual(scenario())


def test_validation_has_a_deadline_and_leaves_nothing_running():
    async def scenario():
        with pytest.raises(TimeoutError, match=r"version 5 did not end within 100 s \(validation.timeout_seconds\)"):
            await validator(Engine(seconds=60), [prompt()] * 5).run(5)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


def sample(versions):
    count = len(versions)
    completion = Completion("r", np.arange(count), np.zeros(count), np.array(versions, dtype=np.int32), "length")
    return sample_from_completion(prompt(), completion, "")


def batch(step, *versions_of_groups) -> TrainingBatch:
    groups: list[list[Sample]] = [[sample(versions)] for versions in versions_of_groups]
    return TrainingBatch.from_groups(step, [Group(10 + index, prompt(), each) for index, each in enumerate(groups)])


def test_a_token_at_the_bound_is_trained_on_and_one_beyond_it_stops_the_run_with_its_group():
    batch(5, [5, 5], [3, 4]).check_staleness(2)
    with pytest.raises(StalenessViolation, match="lags from 0 to 3, allowed 0 to 2; oldest tokens in group 11"):
        batch(5, [5], [2, 4], []).check_staleness(2)
    with pytest.raises(StalenessViolation, match="lags from -1 to 0"):
        batch(5, [5, 6]).check_staleness(2)


@pytest.mark.parametrize("experts", [None, np.full((3, 1, 2), 8, np.uint8)])
def test_a_sample_with_experts_that_the_model_does_not_have_is_named(experts):
    good, wrong = sample([0]), sample([0])
    good.routed_experts = np.full((len(good.token_ids), 1, 2), 7, np.uint8)
    wrong.routed_experts = experts
    finished = StepGroups(0, [FinishedGroup(7, None, Group(7, prompt(), [good, wrong]), 0)])
    run = SimpleNamespace(scheduler=SimpleNamespace(ledger=Ledger()), routing=RoutingShape(1, 8, 2))
    fault = "missing" if experts is None else "from 8 to 8, and the model's go from 0 to 7"
    with pytest.raises(ValueError, match=rf"group 7 \(2\+2\), sample 1: `routed_experts` are {fault}"):
        asyncio.run(rollout_stage(run, finished))


def test_text_that_the_engine_decoded_is_not_decoded_again():
    class Decoding(Engine):
        async def generate(self, request, *, sticky_key=None, min_version=None):
            assert request.with_text
            return replace(await super().generate(request), text=f"text of {request.request_id}")

    engine = Decoding()
    function = replace(rollout(engine), decoded_there=True, decoder=None)
    group = run_virtual(function(3, prompt()))
    assert [sample.response_text for sample in group.samples] == [f"text of train-3-{index}" for index in range(4)]


def test_groups_that_start_together_begin_a_few_in_a_turn_of_the_loop_in_their_order():
    async def scenario():
        pace, begun, turns = Pace(3), [], []

        async def group(number):
            await pace.turn()
            begun.append(number)
            turns.append(turn)

        tasks = [asyncio.create_task(group(number)) for number in range(10)]
        turn = 0
        for turn in range(20):
            if turn == 2:
                tasks[8].cancel()
            await asyncio.sleep(0)
        assert begun == [0, 1, 2, 3, 4, 5, 6, 7, 9]
        assert max(Counter(turns).values()) == 3
        await asyncio.wait_for(group(10), 1)

    run_virtual(scenario())


def test_groups_that_end_together_end_a_few_in_a_turn_of_the_loop():
    async def scenario():
        ready, ended, turn = asyncio.Event(), [], 0

        async def make(asked):
            await ready.wait()
            return Group(asked.group_id, prompt(), [])

        async def group(make_group, number):
            made = await make_group(GroupRequest(number, None, 0, 0))
            ended.append((turn, made.group_id, set(made.times)))

        paced_group = paced(make, SAMPLES_A_TURN // 3, WaitBoard())
        tasks = [asyncio.create_task(group(paced_group, number)) for number in range(10)]
        for turn in range(40):
            if turn == 10:
                ready.set()
            await asyncio.sleep(0)
        assert [number for _, number, _ in ended] == list(range(10)) and all(task.done() for task in tasks)
        assert all(times == {"issued", "judged"} for _, _, times in ended)
        assert max(Counter(when for when, _, _ in ended).values()) == 3

    run_virtual(scenario())


def test_a_batch_is_made_beside_the_event_loop(monkeypatch):
    made_in = []
    make = TrainingBatch.from_groups
    monkeypatch.setattr(
        TrainingBatch, "from_groups", lambda *args: made_in.append(threading.get_ident()) or make(*args)
    )
    tokens = np.array([1, 2], dtype=np.int32)
    sample = Sample(tokens, tokens > 1, np.zeros(2, np.float32), np.array([-1, 0], np.int32), "stop")
    finished = StepGroups(0, [FinishedGroup(0, None, Group(0, prompt(), [sample]), 0)])
    run = SimpleNamespace(
        config=SimpleNamespace(rollout_batch_size=1),
        least_groups=1,
        logp=None,
        max_staleness=0,
        scheduler=SimpleNamespace(ledger=Ledger()),
        side=SimpleNamespace(sample_metrics="reward", metrics=dict),
        routing=None,
    )
    batch = asyncio.run(rollout_stage(run, finished))
    assert batch.metrics["response/tokens"] == 1.0
    assert made_in != [threading.get_ident()] and len(made_in) == 1
    assert not finished.groups and len(batch.groups) == 1


@pytest.mark.parametrize("samples", [1, 8, 4096])
def test_a_recorded_batch_is_freed_bit_by_bit(samples):
    async def nothing(*_):
        await asyncio.sleep(0)

    def made(number, untrained=None):
        data = SampleBatch(
            np.full(number * samples, 1), {"a": np.ones(number * samples)}, {"b": np.ones(number * samples)}
        )
        groups = [Group(index, prompt(), []) for index in range(number)]
        return SimpleNamespace(step=4, metrics={"loss": 1.0}, groups=groups, data=data, untrained=untrained)

    async def main():
        batch, put = made(1200, made(40)), []
        groups = [*batch.groups, *batch.untrained.groups]
        fields = (
            batch.data.tokens,
            batch.untrained.data.tokens,
            batch.data.per_sample,
            batch.untrained.data.per_sample,
        )
        arrays = [weakref.ref(array) for values in fields for array in values.values()]
        left = [weakref.ref(group) for group in groups]
        run = SimpleNamespace(
            critic=None, trainer=None, scheduler=None, pool=None, side=SimpleNamespace(workers=None),
            recorder=SimpleNamespace(step=nothing), config=SimpleNamespace(max_steps=9),
            records=SimpleNamespace(put=lambda *record: put.append(record)),
        )  # fmt: skip
        recording = asyncio.create_task(record(run, batch))
        del groups, fields, batch
        counts = []
        while not recording.done():
            await asyncio.sleep(0)
            counts.append(sum(reference() is not None for reference in left))
        assert put == [(5, {"loss": 1.0})] and counts[-1] == 0
        assert not any(reference() is not None for reference in arrays)
        most = max(before - after for before, after in pairwise(counts))
        assert max(1, SAMPLES_FREED_A_TURN // samples) <= most <= SAMPLES_FREED_A_TURN / samples * 1.1 + 1

    asyncio.run(main())
