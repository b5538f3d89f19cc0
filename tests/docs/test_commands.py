"""Every command of the documentation can be given, and those that are cheap are given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll.cli.main import main
from roll.configs.loader import parse_yaml
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import Summary
from roll.tracking.trackers import MetricsLog
from tests.docs.commands import (
    INSTEAD,
    Command,
    commands_of,
    hidden_commands,
    problems_of_commands,
    train_as_check,
    untold,
)
from tests.docs.pages import Page, pages

PAGES = pages()
WITH_COMMANDS = [page for page in PAGES if any(not command.inline for command in commands_of(page))]
EXIT_CODES = {"check": {0}, "init": {0}, "completion": {0}, "check-env": {0}, "report": {0}, "doctor": {0, 1},
              "advise": {0, 2}}  # fmt: skip
"""Sub-command -> how it may end. `doctor` is asked about a run that has ended, or failed; `advise` about one that is
too short for it, too."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists_with_its_files_flags_and_targets(page, sit_down):
    assert hidden_commands(page) == untold(page) == []
    assert problems_of_commands(page, sit_down(page)) == []


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_cheap_commands_are_really_given(page, sit_down, capsys):
    folder = sit_down(page)
    for command in (command for command in commands_of(page) if not command.inline):
        words = own_words(command)
        if words is None:
            assert kind(command) in INSTEAD, f"{command.where}: {command} is neither run nor excused"
            continue
        replays = "--replay" in words
        if replays or words[0] in ("report", "doctor") or words[0] == "advise" and not words[1].endswith(".yaml"):
            named = words[words.index("--replay") + 1] if replays else words[1]
            assert named in folders_of_runs(folder), f"{command.where}: no run of the reader's is in {named}"
            end_a_run(folder / named)
        code = exit_code(words)
        said = capsys.readouterr()
        unfit = code == 2 and "--gpu-memory" in words and "will not fit" in said.err
        unfit |= code == 2 and replays and "there is no groups.jsonl" in said.err
        unfit |= code == 2 and "cannot run (1 problem)" in said.err and "needs the module `rapidocr`" in said.err
        assert unfit or code in EXIT_CODES.get(words[0], {0}), f"{command.where}: {command}\n{said.out}{said.err}"


def test_each_kind_that_is_not_run_occurs():
    """What nobody needs any more is no excuse any more."""
    seen = {kind(command) for page in PAGES for command in commands_of(page)}
    assert set(INSTEAD) - seen == set()


def own_words(command: Command) -> list[str] | None:
    """Arguments of `roll`, for a command that is run as it stands or, where it trains, as a check; else None."""
    instead = train_as_check(command.words)
    if instead is not None:
        return list(instead)
    if command.program == "eval":
        return re.search(r"\$\(roll ([^()]+)\)", command.words[1])[1].split()
    if command.program != "roll" or kind(command) in INSTEAD:
        return None
    words = list(command.words[1:])
    if words[:1] in (["simulate"], ["advise"]):
        words += ["--draws", "0"]  # without the interval, which takes sixteen simulations more
    if words[:1] == ["advise"]:
        words += ["--seconds", "0"]  # the file as it is, and nothing else
    return [*words, "--yes"] if words[:1] == ["init"] and "--yes" not in words else words


def kind(command: Command) -> str:
    """Under which name `INSTEAD` has it."""
    if train_as_check(command.words) is not None:
        return "roll train"
    if command.program == "python":
        module = command.words[2] if command.words[1:2] == ("-m",) else None
        return module if module in INSTEAD else "python script"
    if command.words[:2] in (("roll", "serve"), ("roll", "chat")):
        return "roll serve"
    if command.words[:3] == ("roll", "doctor", "--gpu"):
        return "roll doctor --gpu"
    return "roll check-agent" if command.words[:2] == ("roll", "check-agent") else command.program


def exit_code(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


def folders_of_runs(folder: Path) -> set[str]:
    """Where runs go whose configurations the reader has: the examples, what pages have them save, what `init` wrote."""
    files = [*folder.glob("*.yaml"), *folder.glob("examples/*/*.yaml")]
    names = {parse_yaml(path.read_text(encoding="utf-8"), str(path)).get("exp_name") for path in files}
    return {f"output/{name}/latest" for name in names if name}


def end_a_run(folder: Path) -> None:
    """A run of one step that has ended."""
    if folder.exists():
        return
    run = RunDirectory.create(str(folder), folder.parent.name)
    run.write_config("pipeline: rlvr\nexp_name: additions\nmax_steps: 1\n")
    summary = Summary(run.summary, clock=lambda: 2.0, started=0.0)
    log = MetricsLog(run.metrics)
    log.log({"reward/mean": 0.5, "time/step": 1.0}, 1)
    log.close()
    summary.update({"reward/mean": 0.5}, 1)
    summary.finish("success", ledger={"issued": 1, "consumed": 1})


def test_only_runs_of_configurations_that_the_reader_has_can_be_looked_at(sit_down):
    folder = sit_down(Page("docs/a.md", "Save this as `own.yaml`:\n\n```yaml\nexp_name: mine\n```\n"))
    assert {"output/mine/latest", "output/my_run/latest", "output/quickstart/latest"} <= folders_of_runs(folder)
    assert "output/WRONG/latest" not in folders_of_runs(folder)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("roll tarin my_run.yaml", "no command tarin"),
        ("roll --confg my_run.yaml", "no flag --confg"),
        ("roll train examples/no-such/rlvr.yaml", "neither in the repository nor saved"),
        ("roll check my_other_run.yaml", "neither in the repository nor saved"),
        ("make bench-nothing", "no target bench-nothing"),
        ("make venv TROCH=torch", "no variable TROCH"),
        ("python examples/quickstart/make_modell.py", "neither in the repository nor saved"),
        ("python benchmarks/engines.py --repeat 3", "no flag --repeat"),
        ("python -m roll.configs.refrence", "no module"),
        ('pip install -e ".[loras]"', "no extra loras"),
        ('pip install "roll[lora]"', "somebody else's"),
        ("pip install numpyy", "no requirement of ours"),
        ("pip install -r requirements/sglangs.txt", "neither in the repository nor saved"),
        ("ray start --heads", "No such option"),
        ("ray begin --head", "no command begin"),
        ("pytest tests/no_such_test.py", "neither in the repository nor saved"),
        ('eval "$(roll completon bash)"', "no command completon"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line, reason, sit_down):
    page = Page("docs/a.md", f"Words.\n\n```\n{line}\n```\n")
    [found] = problems_of_commands(page, sit_down(page))
    assert found.startswith("docs/a.md:4: ") and reason in found


def test_a_program_that_nobody_checks_is_found(sit_down):
    page = Page("docs/a.md", "Words.\n\n```bash\nrool train my_run.yaml\n```\n")
    assert "none of the programs" in problems_of_commands(page, sit_down(page))[0]


@pytest.mark.parametrize("code", ["roll tarin FILE", "make bench-nothing", 'pip install -e ".[loras]"'])
def test_commands_within_sentences_are_looked_at(code, sit_down):
    page = Page("docs/a.md", f"Say `{code}` and wait.\n")
    assert len(problems_of_commands(page, sit_down(page))) == 1


@pytest.mark.parametrize("text", ["what it says:\nroll train my_run.yaml\n", "$ make demo\n"])
def test_a_command_in_the_middle_of_output_is_not_overlooked(text):
    assert len(hidden_commands(Page("docs/a.md", f"Words.\n\n```text\n{text}```\n"))) == 1


@pytest.mark.parametrize("line", ['roll train "my_run.yaml', "roll tarin 'x"])
def test_a_command_with_an_open_quote_is_found(line, sit_down):
    page = Page("docs/a.md", f"Words.\n\n```bash\n{line}\n```\n")
    assert "none of the programs" in problems_of_commands(page, sit_down(page))[0]


@pytest.mark.parametrize("text", ["seed: 1", '{"a": 1}', "import roll", "what it says", "roll train 'x"])
def test_a_block_that_does_not_say_what_it_is_is_found(text):
    assert untold(Page("docs/a.md", f"Words.\n\n```\n{text}\n```\n")) == ["docs/a.md:4"]


@pytest.mark.parametrize("line", ["roll check my_run.yaml max_stps=3", "roll train my_run.yaml seed=none"])
def test_a_command_whose_keys_do_not_exist_fails_when_it_is_given(line, sit_down, capsys):
    page = Page("docs/a.md", f"Words.\n\n```\n{line}\n```\n")
    sit_down(page)
    [command] = commands_of(page)
    assert exit_code(own_words(command)) == 2
    assert "cannot run" in capsys.readouterr().err


def test_a_file_that_a_page_saves_or_makes_is_there_for_its_commands(sit_down):
    text = "Save this as `own.yaml`:\n\n```yaml\nseed: 1\n```\n\n```\nroll check own.yaml\nroll init made.yaml --yes\n"
    page = Page("docs/a.md", text + "roll check made.yaml   # and this\n```\n")
    assert problems_of_commands(page, sit_down(page)) == []
