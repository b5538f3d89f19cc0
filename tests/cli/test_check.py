"""`roll check`: what it says, what it refuses, and that neither models, data nor GPUs need be here."""

from __future__ import annotations

import json
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from roll.check import plan
from roll.cli.main import Ended, main
from roll.configs.errors import ConfigError
from roll.configs.loader import load_config
from roll.distribution import install_command
from roll.engines import options as engine_options
from roll.pipeline.preflight import look_up
from roll.sandbox.sandbox import Sandbox
from roll.tracking.run_directory import RunDirectory
from tests.pipeline.tiny import make_task, tiny_config, write_config
from tests.sandbox.sandboxes import needs_sandbox

GPUS = "examples/qwen2.5-7B-rlvr_fsdp2/rlvr_config.yaml"


@pytest.fixture
def run(tmp_path):
    """A run whose model and data are here."""
    make_task(tmp_path)
    return str(write_config(tmp_path, tiny_config(tmp_path), "run.yaml"))


def test_plan_memory_and_needs_are_printed_and_nothing_is_started(run, tmp_path, capsys):
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["check", run]) == 0
    said = capsys.readouterr().out
    for words in ("samples a step", "staleness", "memory of one process", "gradients", f"[x] model {tmp_path}"):
        assert words in said
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_run_on_gpus_is_checked_without_its_model_data_and_gpus(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["check", GPUS]) == 0
    said = capsys.readouterr().out
    for words in ("model Qwen/Qwen2.5-7B", "data data/math/train.jsonl", "8 GPUs of 80 GiB"):
        assert f"[ ] {words} " in said
    assert "7.62 billion" in said


def test_what_does_not_fit_is_exit_code_2(capsys):
    assert main(["check", GPUS, "--gpu-memory", "24"]) == 2
    said = capsys.readouterr()
    assert "will not fit: a device of actor_train needs" in said.out and "docs/memory.md" in said.err


@pytest.mark.parametrize(
    ("command", "inside"),
    [
        (["check", "run.yaml"], "roll.cli.check.read_config"),
        (["simulate", "run.yaml"], "roll.cli.simulate._simulate"),
        (["advise", "run.yaml"], "roll.cli.advise._advise"),
        (["check-env", "frozen_lake"], "roll.agentic.conformance.check_env"),
        (["check-agent", "run.yaml"], "roll.cli.check.read_config"),
        (["convert", "run.yaml", "--from", "trl"], "roll.cli.convert.read_text"),
        (["report", "run"], "roll.report.page.read_run"),
        (["doctor", "run"], "roll.doctor.diagnosis.diagnose"),
    ],
)
def test_a_command_that_is_interrupted_says_so_without_a_traceback(command, inside, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    RunDirectory.create("run", "x")
    monkeypatch.setattr(inside, interrupted)
    assert main(command) == 1
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("when", ["computes", "ends"])
def test_a_plain_loop_may_be_interrupted_while_it_computes_and_while_it_ends(run, tmp_path, monkeypatch, capsys, when):
    terminated = []

    def result():
        if when == "computes":
            raise KeyboardInterrupt

    @contextmanager
    def executor(*_, **__):
        yield SimpleNamespace(submit=lambda *_: SimpleNamespace(result=result))
        raise KeyboardInterrupt

    child = SimpleNamespace(terminate=lambda: terminated.append(when))
    monkeypatch.setattr("roll.cli.check.attempt_run", lambda *_: Ended(0))
    monkeypatch.setattr("roll.cli.check.RunDirectory.latest", lambda _: RunDirectory(tmp_path))
    monkeypatch.setattr("roll.cli.check.ProcessPoolExecutor", executor)
    monkeypatch.setattr("roll.cli.check.active_children", lambda: [child])
    assert main(["check", run, "--exact", "1"]) == 1
    assert capsys.readouterr().err == "interrupted\n"
    assert terminated == (["computes"] if when == "computes" else [])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["max_stps=3"], "did you mean `max_steps`"),
        (["actor_train.pg_variant=pop"], "actor_train.pg_variant"),
        (["actor_train.strategy_args.strategy_config.gradient_checkpoint=true"], "gradient_checkpointing"),
        (["rewards.math.verifier=no_such_module:judge"], "rewards.math.verifier"),
        (["--gpu-memory", "0"], "cluster.device_memory_gib"),
    ],
)
def test_what_cannot_work_is_exit_code_2_with_its_path(overrides, words, capsys):
    assert main(["check", GPUS, *overrides]) == 2
    assert words in capsys.readouterr().err


ENGINE = "actor_infer.strategy_args.strategy_config"
TRAINER = "actor_train.strategy_args.strategy_config"


@pytest.mark.parametrize(
    ("example", "path", "value", "allowed"),
    [
        ("fsdp2/rlvr_config", f"{ENGINE}.gpu_memory_utilization", "abc", "a number, > 0 and <= 1"),
        ("fsdp2/rlvr_config", f"{ENGINE}.max_num_seqs", "abc", "a whole number, >= 1"),
        ("fsdp2/rlvr_config", f"{ENGINE}.kv_cache_memory_bytes", "20G", "a whole number, >= 0"),
        ("megatron/rlvr_config", f"{TRAINER}.tensor_model_parallel_size", "abc", "a whole number, >= 1"),
        ("deepspeed/rlvr_config", f"{TRAINER}.zero_optimization", "3", "a mapping"),
        ("megatron/rlvr_config_async", f"{ENGINE}.mem_fraction_static", "abc", "a number, > 0 and <= 1"),
    ],
)
def test_an_option_that_the_memory_is_computed_from_is_judged_before(example, path, value, allowed, capsys):
    file = f"examples/qwen2.5-7B-rlvr_{example}.yaml"
    for command in (["check", file], ["train", file]):
        assert main([*command, f"{path}={value}"]) == 2
        said = capsys.readouterr().err
        assert f"{path}: " in said and f"write {allowed}" in said and "Traceback" not in said


ENGINES = "examples/qwen2.5-7B-rlvr_megatron/rlvr_config_async.yaml"


@pytest.fixture
def without_sglang(monkeypatch):
    """As on a machine where SGLang is not installed."""
    monkeypatch.setattr(engine_options, "sglang_argument_names", lambda: None)
    there = {"sglang": None, "megatron": find_spec("roll")}
    monkeypatch.setattr(plan, "find_spec", lambda package: there.get(package, find_spec(package)))


def test_what_only_a_missing_package_could_tell_is_said_to_be_unchecked(without_sglang, capsys):
    assert main(["check", ENGINES, f"{ENGINE}.mem_fraction_statik=0.5"]) == 0
    said = capsys.readouterr().out
    assert "[ ] package sglang" in said and "[ ] options of sglang" in said and "options of megatron" not in said
    assert main(["check", ENGINES, f"{ENGINE}.tp_size=2"]) == 2
    assert f"{ENGINE}.tp_size: the run itself sets this" in capsys.readouterr().err


def test_a_run_does_not_start_without_the_package_of_its_engine(without_sglang):
    with pytest.raises(ConfigError) as refused:
        look_up(load_config(ENGINES), with_model=False, without=())
    engine = "actor_infer.strategy_args.strategy_name"
    (problem,) = (each for each in refused.value.problems if each.path == engine)  # the trainer's may be absent, too
    assert "sglang is not installed" in problem.message and install_command("sglang") in problem.remedy


JUDGED = """rewards.writing={verifier: judge, judge: {base_url: "http://127.0.0.1:9/v1", model: judge-32b}}"""


def test_a_judge_and_a_reward_model_are_needs_where_the_run_is_not(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    taste = "rewards.taste={verifier: reward_model, device_mapping: [4], infer_batch_size: 4}"
    assert main(["check", GPUS, JUDGED, taste, "reward_pretrain=Qwen/Qwen2.5-0.5B", "async_generation_ratio=0"]) == 0
    said = capsys.readouterr().out
    assert "[ ] judge judge-32b" in said and "http://127.0.0.1:9/v1" in said
    assert "[ ] model Qwen/Qwen2.5-0.5B " in said and "and when a batch is scored" in said


def test_a_judge_that_does_not_answer_is_a_problem_where_the_run_is(run, capsys):
    assert main(["check", run, JUDGED.replace("writing", "addition"), "stall_timeout_seconds=900"]) == 2
    assert "rewards.addition.judge.base_url: the judge cannot be asked" in capsys.readouterr().err


def test_programs_that_could_not_be_run_here_are_a_problem(run, capsys, monkeypatch):
    monkeypatch.setattr("roll.rewards.code.default_sandbox", lambda: Sandbox(levels=[]))
    assert main(["check", run, "rewards.addition.verifier=code"]) == 2
    assert "rewards.addition.verifier: the verifier `code`: no sandbox for untrusted code" in capsys.readouterr().err


@needs_sandbox
def test_tests_of_programs_that_cannot_be_read_are_a_problem(run, capsys):
    assert main(["check", run, "rewards.addition.verifier=code"]) == 2
    said = capsys.readouterr().err
    assert "`rewards.addition` cannot judge prompt" in said and '"inputs"' in said


def test_data_that_is_here_is_read(run, tmp_path, capsys):
    data = next(tmp_path.rglob("*.jsonl"))
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("\n".join(json.dumps(line | {"domain": "unheard_of"}) for line in lines) + "\n")
    assert main(["check", run]) == 2
    assert "unheard_of" in capsys.readouterr().err


def test_a_missing_file_is_a_need_and_an_empty_one_too(run, tmp_path, capsys):
    data = next(tmp_path.rglob("train*.jsonl"))
    data.unlink()
    assert main(["check", run]) == 0
    assert f"[ ] data {data}" in capsys.readouterr().out
    data.touch()
    assert main(["check", run]) == 0
    (need,) = [line for line in capsys.readouterr().out.splitlines() if f"data {data}" in line]
    assert "[ ]" in need and "is empty" in need


def test_train_and_config_are_the_same_command(capsys):
    for arguments in (["train", "no-such.yaml"], ["--config", "no-such.yaml"]):
        assert main(arguments) == 2
        assert "no-such.yaml: there is no such file" in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "roll check FILE" in said and "roll train FILE" in said
