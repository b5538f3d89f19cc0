"""`roll doctor --gpu`: whatever becomes of a check is a verdict, and the file has no secrets."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time

import psutil
import pytest

from roll.check.config import check_config, read_config
from roll.check.memory import estimate_memory
from roll.cli.main import main
from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.doctor import gpu_checks, gpus
from roll.doctor.gpu_checks import CHECKS, Bench, NotHere
from roll.doctor.gpus import Ended, Machine, judge, look, masked, run_in_process
from tests.tiers import need

TWO = Machine([{"name": "NVIDIA H100"}, {"name": "NVIDIA H100"}], "13.0")


def ending(code, said=None, words=""):
    """A process that ends so, and leaves this behind."""

    def runner(command, output, seconds):
        output.write_text(words)
        if said is not None:
            (output.parent / "result.json").write_text(json.dumps(said) if isinstance(said, dict) else said)
        return Ended(code, 3.0)

    return runner


@pytest.mark.parametrize(
    ("runner", "verdict", "reason"),
    [
        (ending(0, {"figures": {"bytes": 3}}), "passed", ""),
        (ending(0, {"not_here": "needs 2 GPUs, 1 here"}), "not here", "needs 2 GPUs, 1 here"),
        (ending(1, {"failed": "WeightsDiffer: the content of 'a'"}), "failed", "WeightsDiffer: the content of 'a'"),
        (ending(-signal.SIGSEGV), "failed", "its process was ended by SIGSEGV"),
        (ending(None), "failed", f"it took longer than {gpus.LIMIT_SECONDS:g} s"),
        (ending(None, {"figures": {}}), "failed", f"it took longer than {gpus.LIMIT_SECONDS:g} s"),
        (ending(-signal.SIGABRT, {"figures": {}}), "failed", "its process was ended by SIGABRT"),
        (ending(0), "failed", "its process ended with status 0"),
        (ending(0, '{"figures'), "failed", "its process ended with status 0"),
        (ending(7, words="cannot import it"), "failed", "its process ended with status 7"),
    ],
)
def test_however_a_check_ends_it_is_a_verdict(runner, verdict, reason):
    found = judge("cuda_ipc", TWO, runner)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_the_last_words_of_a_check_that_failed_are_kept_and_its_folder_is_not():
    folders = []

    def runner(command, output, seconds):
        folders.append(output.parent)
        assert command[-3:] == [str(output.parent), "cuda", "2"] and seconds == gpus.LIMIT_SECONDS
        return ending(-signal.SIGKILL, words="first\nout of memory\n")(command, output, seconds)

    assert judge("cuda_ipc", TWO, runner).output == ["first", "out of memory"]
    assert not folders[0].exists()


def test_a_check_that_hangs_ends_with_all_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "ENDING_SECONDS", 0.1)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )
    program = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {deaf!r}]).pid, flush=True); "
    output = tmp_path / "output"
    ended = run_in_process([sys.executable, "-c", program + "import time; time.sleep(99)"], output, 2.0)
    assert ended.code is None and 2.0 <= ended.seconds < 60
    (child,) = (int(word) for word in output.read_text().split() if word.isdigit())
    give_up = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up, "a process of the check lives on"
        time.sleep(0.02)


def test_gpus_that_torch_cannot_compute_on_are_a_finding():
    found = look(ending(0, words='warning\n{"cuda": "13.0", "gpus": [{"name": "NVIDIA H100"}]}\n'))
    assert (len(found.gpus), found.cuda, found.problem) == (1, "13.0", "")
    found = look(ending(-signal.SIGBUS, words="CUDA error: no kernel image\n"))
    assert not found.gpus and "SIGBUS" in found.problem and "no kernel image" in found.problem


def test_gpus_that_torch_does_not_see_are_a_finding(monkeypatch):
    """As with a build for CPUs; not where somebody hid them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_said", lambda *command: ["GPU 0: NVIDIA H100 (UUID: GPU-1)", "GPU 1: NVIDIA H100"])
    none = ending(0, words='{"cuda": null, "gpus": []}\n')
    assert "2 GPUs" in look(none).problem and "a build for CPUs" in look(none).problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look(none).problem == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus, "_said", lambda *command: ["No such file or directory: 'nvidia-smi'"])
    assert look(none).problem == ""


def test_an_interrupted_command_leaves_the_checks_that_are_done(tmp_path, monkeypatch):
    def interrupted(command, output, seconds):
        if "nccl" in command:
            raise KeyboardInterrupt
        return ending(0, {"figures": {}})(command, output, seconds)

    monkeypatch.setattr(gpus, "look", lambda runner: TWO)
    monkeypatch.setattr(gpus, "run_in_process", interrupted)
    file = tmp_path / "sent.json"
    with pytest.raises(KeyboardInterrupt):
        gpus.main(["--gpu", "--only", "memory", "nccl", "--output", str(file)])
    assert [check["name"] for check in json.loads(file.read_text())["checks"]] == ["memory"]


def test_no_secret_and_no_name_gets_into_the_file(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    environment = {"HF_TOKEN": "hf_abcdef", "WANDB_API_KEY": "k" * 40, "PATH": "/usr/bin", "EMPTY_TOKEN": ""}
    report = {
        "output": ["401 for hf_abcdef", "/home/jane/.cache/x", "k" * 40],
        "environment": {"VLLM_API_KEY": "short", "CUDA_HOME": "/usr/local/cuda"},
        "figures": {"bytes": 3},
    }
    assert masked(report, environment) == {
        "output": ["401 for ***", "~/.cache/x", "***"],
        "environment": {"VLLM_API_KEY": "***", "CUDA_HOME": "/usr/local/cuda"},
        "figures": {"bytes": 3},
    }


def test_a_user_without_a_name_and_with_the_root_as_home_gets_a_file(monkeypatch):
    """As in a container that is run under another number."""

    def unknown():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(gpus.getpass, "getuser", unknown)
    monkeypatch.setenv("HOME", "/")
    assert masked(["/usr/bin/nvidia-smi"], {}) == ["/usr/bin/nvidia-smi"]


def test_a_secret_that_begins_another_leaves_nothing_of_it():
    assert masked("abcdef-more abcdef", {"A_TOKEN": "abcdef", "B_TOKEN": "abcdef-more"}) == "*** ***"


def test_a_file_that_cannot_be_written_is_said_before_the_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "look", lambda runner: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as ended:
        gpus.main(["--gpu", "--output", str(tmp_path / "nowhere" / "sent.json")])
    assert ended.value.code == 2 and "No such file" in capsys.readouterr().err


def test_processes_with_a_group_of_their_own_end_with_the_check(tmp_path):
    child = "import os, time; os.setpgrp(); print('ready', flush=True); time.sleep(99)"
    program = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)"
    output = tmp_path / "output"
    run_in_process([sys.executable, "-c", program + "; p.stdout.readline(); print(p.pid)"], output, 20)
    pid = int(output.read_text())
    give_up = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up, "a process of the check lives on"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("machine", "code", "words"),
    [
        (TWO, 0, ["2 GPUs: NVIDIA H100", "passed ", "nothing failed"]),
        (Machine(), 0, ["no GPU here", "passed on CPUs", "with GPUs: ", "here: "]),
        (Machine(problem="torch cannot compute on the GPUs"), 1, ["torch cannot compute on the GPUs"]),
    ],
)
def test_a_table_and_one_file(machine, code, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "look", lambda runner: machine)
    monkeypatch.setattr(gpus, "run_in_process", ending(0, {"figures": {"time/step": 0.5}}))
    file = tmp_path / "sent.json"
    assert main(["doctor", "--gpu", "--output", str(file)]) == code
    said = capsys.readouterr().out
    assert all(word in said for word in words) and all(f"\n{name} " in said for name in CHECKS)
    report = json.loads(file.read_text())
    assert [check["name"] for check in report["checks"]] == list(CHECKS) and report["versions"]["torch"]
    assert report["checks"][0]["figures"] == {"time/step": 0.5}


def test_a_check_that_failed_is_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "look", lambda runner: TWO)
    monkeypatch.setattr(gpus, "run_in_process", ending(1, {"failed": "OSError: no\nmore"}))
    arguments = ["doctor", "--gpu", "--only", "nccl", "memory", "--output", str(tmp_path / "sent.json")]
    assert main(arguments) == 1
    assert "failed: nccl, memory" in capsys.readouterr().out


RUNS = ("shared_memory", "object_store", "checkpoint", "nccl", "cuda_ipc", "two_devices", "killed_engine", "memory")


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_what_is_run_on_gpus_is_a_configuration_that_can_work(name, count, tmp_path, monkeypatch):
    """As `roll check` sees it, on a machine with so many GPUs."""
    need("vllm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    small = gpu_checks.make_model
    monkeypatch.setattr(gpu_checks, "make_model", lambda folder, vocabulary, hidden: small(folder, 512, 128))
    seen = []

    def run(bench, config):
        seen.append(check_config(read_config(config)))
        assert estimate_memory(seen[0]).unknown == []
        return [{"engine/restarts": 1.0, "engine/reissued": 0.0, "memory/actor_train/peak_gib": 0.01}]

    monkeypatch.setattr(gpu_checks, "run", run)
    bench = Bench(tmp_path, "cuda", count)
    if count == 1 and name in ("nccl", "two_devices"):
        with pytest.raises(NotHere):
            CHECKS[name].run(bench)
        return
    CHECKS[name].run(bench)
    (config,) = seen
    devices = {
        role: parse_device_mapping(getattr(config, role).device_mapping) for role in ("actor_train", "actor_infer")
    }
    assert max(max(each) for each in devices.values()) < count and config.cluster.device == "cuda"
    assert config.weight_update.canary_interval == 1
    if name in ("nccl", "cuda_ipc"):
        assert (derived.weight_transport(config), derived.shares_devices(config, "actor_infer")) == (
            name,
            name == "cuda_ipc",
        )
    if name == "two_devices":
        assert config.actor_infer.num_gpus_per_engine == 2 == derived.data_parallel_ranks(config.actor_train)


def test_what_a_machine_lacks_is_said(tmp_path):
    with pytest.raises(NotHere, match="needs 2 GPUs, 1 here"):
        Bench(tmp_path, "cuda", 1).need(2)
    with pytest.raises(NotHere, match="no_such_engine is not installed"):
        Bench(tmp_path, "cuda", 4).need(2, "torch", "no_such_engine")
    Bench(tmp_path, "cpu", 0).need(2, "torch")


def test_a_check_that_raises_says_so_in_its_result(tmp_path, monkeypatch):
    def check(bench):
        raise ValueError("wrong tensor")

    monkeypatch.setitem(CHECKS, "memory", gpu_checks.Check("", "", check))
    assert gpu_checks.main(["memory", str(tmp_path), "cpu", "0"]) == 1
    assert json.loads((tmp_path / "result.json").read_text()) == {"failed": "ValueError: wrong tensor"}


@pytest.fixture
def embedded(tmp_path, monkeypatch):
    """A bench whose engine is `hf_infer`."""
    monkeypatch.setattr(Bench, "engine", lambda bench: ("hf_infer", {}))
    return Bench(tmp_path, "cpu", 0)


@pytest.mark.tier("all")
def test_experts_that_an_update_does_not_reach_are_found(embedded, monkeypatch):
    figures = gpu_checks.experts(embedded)
    assert figures["1/distance"] < 1e-3 < 0.1 < figures["1/distance_to_old"]
    update, first = gpu_checks._update, dict(gpu_checks.make_experts().named_parameters())

    async def without_experts(engine, model, version, bench):
        model = copy.deepcopy(model)
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.data.copy_(first[name].data)
        await update(engine, model, version, bench)

    monkeypatch.setattr(gpu_checks, "_update", without_experts)
    with pytest.raises(RuntimeError, match="gate_up_proj"):
        gpu_checks.experts(embedded)


@pytest.mark.tier("all")
def test_an_engine_that_sleeps_and_wakes_without_its_update_is_found(embedded, monkeypatch):
    assert gpu_checks.sleep_and_wake(embedded)["distance"] < 1e-3

    async def forgets(engine, model, version, bench):
        pass

    monkeypatch.setattr(gpu_checks, "_update", forgets)
    with pytest.raises(RuntimeError, match="after sleep and update"):
        gpu_checks.sleep_and_wake(embedded)


@pytest.mark.tier("soak")
@pytest.mark.timeout(3000)
def test_every_part_for_cpus_passes(tmp_path):
    file = tmp_path / "sent.json"
    assert main(["doctor", "--gpu", "--output", str(file)]) == 0, file.read_text()
    verdicts = {check["name"]: check["verdict"] for check in json.loads(file.read_text())["checks"]}
    assert verdicts == dict.fromkeys(CHECKS, "passed")
    assert os.environ["HOME"] not in file.read_text()
