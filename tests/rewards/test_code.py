"""Programs that try to be paid without solving their task, and programs that solve it. All are really run."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.errors import ConfigError
from roll.configs.rewards import RewardConfig
from roll.data.records import Prompt
from roll.rewards.base import RewardFailed, RewardInput
from roll.rewards.code import CodeVerifier, last_program, read_tests
from roll.rewards.registry import check_machine, check_prompts, resolve_verifier
from roll.sandbox.sandbox import Sandbox, SandboxFailed, SandboxUnavailable, default_sandbox
from tests.rewards.test_pool import run as run_pool
from tests.sandbox.sandboxes import needs_sandbox

pytestmark = needs_sandbox

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
HANG_SECONDS = 60.0
ADD = "def add(a, b):\n    return a + b\n"
READ = "a, b = map(int, input().split())\nprint(a + b)\n"


def judge(program: str, truth: object, **arguments) -> dict[str, float]:
    verifier = CodeVerifier(60.0, **arguments)
    return asyncio.run(verifier(f"I think:\n\n```python\n{program}\n```\nDone.", truth))


def score(program: str, truth: object, **arguments) -> float:
    return judge(program, truth, **arguments)["score"]


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        (READ, SUMS),
        (READ, json.dumps(SUMS)),
        (READ + "exit()", SUMS),
        ("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in READ.splitlines()), SUMS),
        ("from __future__ import annotations\n" + READ, SUMS),
        (ADD, CALLS),
        (ADD, {"entry_point": "add", "inputs": [[1, 2]], "outputs": [3.0000001]}),
        ("class Solution:\n    def add(self, a, b):\n        return a + b\n", CALLS),
        ("def add(a, b):\n    print('noise', end='')\n    return a + b\n", CALLS),
        ("def add(a, b):\n    return (a, {'b': [b]})", {**CALLS, "outputs": [[1, {"b": [2]}], [3, {"b": [4]}]]}),
        (ADD + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))", CALLS),
        (ADD, ASSERTS),
        (ADD, json.dumps(ASSERTS)),
        (ADD, {"asserts": "for each in range(9):\n    assert add(each, 1) == each + 1"}),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'", ["assert P(1).x == 1"]),
    ],
)
def test_a_right_program_gets_everything(program, truth):
    wanted = {"score": 1.0, "tests_passed": 1.0, "timed_out": 0.0, "no_program": 0.0}
    assert judge(program, truth) == wanted


@pytest.mark.tier("all")
@pytest.mark.parametrize("truth", [SUMS, CALLS, ASSERTS], ids=["input", "calls", "asserts"])
@pytest.mark.parametrize(
    "program",
    [
        "",
        "def add(",
        "print(3)\ndef add(a, b): return 3",
        "raise SystemExit(0)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "def add(a, b):\n    import sys\n    sys.exit(0)",
        "import atexit, os; atexit.register(os._exit, 0)\ndef add(a, b): return None",
        "print('all tests passed'); print('OK'); print(1)",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.close(1); os.close(0)",
        "def add(a, b):\n    return add(a, b)\nadd(1, 2)",
        "\x00",
        "'''",
    ],
)
def test_a_wrong_program_gets_nothing(program, truth):
    assert score(program, truth) == 0.0


EARLY = "import os\nos.write(1, open(__file__).read().encode() if '__file__' in globals() else b'')\n"
PATCHES = """
import builtins, json, os, sys, __main__
def nothing(*args, **named): return None
for module, names in ((builtins, 'exec compile eval len int isinstance BaseException AssertionError bytearray'),
                      (os, 'read'), (json, 'loads dumps')):
    for name in names.split():
        setattr(module, name, nothing)
__main__.main = nothing
for name in list(vars(__main__)):
    if callable(vars(__main__)[name]):
        setattr(__main__, name, nothing)
def add(a, b): return 0
"""
FRAMES = """
import gc, os, re, sys
def add(a, b):
    texts = []
    frame = sys._getframe()
    while frame:
        texts += [repr(value) for value in [*frame.f_locals.values(), *frame.f_globals.values()]]
        frame = frame.f_back
    texts += [each for each in gc.get_objects() if isinstance(each, str)]
    texts += sys.argv + list(os.environ.values()) + [open(sys.argv[0]).read()]
    for text in texts:
        for found in re.findall('[0-9a-f]{32}', text):
            os.write(1, found.encode() + b'\\n')
    return 0
add(0, 0)
"""


@pytest.mark.tier("all")
@pytest.mark.parametrize("program", [EARLY, PATCHES, FRAMES], ids=["own file", "patched builtins", "frames"])
@pytest.mark.parametrize("truth", [CALLS, ASSERTS], ids=["calls", "asserts"])
def test_what_a_program_finds_in_its_process_is_not_enough(program, truth):
    assert score(program, truth) == 0.0


def test_a_shown_proof_is_that_of_another_assertion():
    """It waits in the pipe until its assertion has held, so the first assertion's proof says nothing of the second."""
    program = "import sys\ndef add(a, b):\n    print(sys._getframe(2).f_locals)\n    return 3"
    assert judge(program, ASSERTS, score="share")["tests_passed"] == 0.5


EQUAL = "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
STOLEN = "import os\nfor fd in range(3, 64):\n try: os.write(1, os.read(fd, 9999))\n except OSError: pass"


@pytest.mark.tier("all")
@pytest.mark.parametrize("program", [EQUAL, STOLEN], ids=["equal to everything", "reads the pipe"])
def test_who_attacks_its_own_process_fools_assertions_only(program):
    """Documented: what is compared in the program's process is in its hands. Should this fail, correct the page."""
    assert score(program, CALLS) == score(program, SUMS) == 0.0
    assert score(program, ASSERTS) == 1.0


def test_expected_outputs_never_enter_the_process():
    secret = "a secret that is expected"
    for truth in ({"inputs": ["x"], "outputs": [secret]}, {"fn_name": "f", "inputs": [["x"]], "outputs": [secret]}):
        for each in read_tests(truth):
            assert secret not in each.stdin + each.code("def f(x): return x")


def test_a_program_is_not_given_what_is_asked_of_it_on_its_standard_input():
    assert score(f"import sys\nasked = sys.stdin.read()\n{ADD}", [*ASSERTS, "assert asked == ''"]) == 1.0


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("1  \\n2\\t\\n\\n\\n", "1\n2", True),
        ("1\\r\\n2\\r\\n", "1\n2\n", True),
        ("1\\n\\n2", "1\n2", False),
        (" 1\\n2", "1\n2", False),
        ("1 2", "1\n2", False),
        ("1\\n2\\n3", "1\n2", False),
        ("", "", True),
        ("\u00e4\u4e2d", "\u00e4\u4e2d", True),
        ("1\\n2", ["1", "2"], True),
        ("1.0", "1", False),
    ],
)
def test_standard_output_is_compared_but_for_white_space_at_the_ends(printed, expected, right):
    assert score(f"print('{printed}', end='')", {"inputs": [""], "outputs": [expected]}) == float(right)


def test_a_right_output_with_a_failure_is_no_success():
    truth = {"inputs": [""], "outputs": ["1"]}
    assert score("print(1)\nraise ValueError", truth) == 0.0
    assert score("print(1)\nexit(3)", truth) == 0.0
    assert score("print(1)\nexit(0)", truth) == 1.0


def test_a_long_output_has_room_and_a_flood_has_none():
    long = "x" * 300_000
    assert score("print('x' * 300_000)", {"inputs": [""], "outputs": [long]}) == 1.0
    assert score("while True: print('x' * 1000)", {"inputs": [""], "outputs": ["x"]}) == 0.0
    assert score("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"inputs": [""], "outputs": [""]}) == 0.0


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "returned",
    ["10 ** 4000", "-10 ** 400", "float('nan')", "float('inf')", "{1, 2}", "'3'", "None", "object()", "b'3'", "[3]"],
)
def test_a_strange_result_is_wrong_and_no_fault(returned):
    truth = {"fn_name": "f", "inputs": [[], []], "outputs": [3, 3.0]}
    assert judge(f"def f(): return {returned}", truth, score="share")["tests_passed"] == 0.0


def test_a_result_nested_beyond_all_bounds_is_wrong_and_no_fault():
    program = "def f():\n    x = []\n    for _ in range(900): x = [x]\n    return x"
    truth = {"fn_name": "f", "inputs": [[]], "outputs": [[]]}
    assert score(program, truth) == 0.0
    [called] = read_tests(truth)  # its marker comes last on its standard input
    forged = asyncio.run(default_sandbox().run_async(f"print({called.stdin[-32:]!r} + '[' * 60_000)"))
    assert called.passed(forged) == 0


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("program", "timed_out"),
    [
        ("while True: pass", 1.0),
        ("import time; time.sleep(60)", 1.0),
        ("x = bytearray(1 << 30)", 0.0),
        ("import os\nwhile True: os.fork()", 0.0),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", 0.0),
        ("while True: open('f', 'ab').write(b'x' * (1 << 20))", 0.0),
    ],
    ids=["loop", "sleep", "memory", "fork bomb", "threads", "disk"],
)
def test_a_program_without_measure_is_ended_and_gets_nothing(program, timed_out):
    began = time.monotonic()
    outcome = judge(program, SUMS, wall_seconds=1.0, memory_mib=256)
    assert outcome["score"] == 0.0 and outcome["timed_out"] >= timed_out
    assert time.monotonic() - began < HANG_SECONDS


@pytest.mark.tier("all")
def test_a_loop_in_one_test_leaves_the_others_alone():
    program = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    truth = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    outcome = judge(program, truth, wall_seconds=5.0, score="share")
    assert outcome == {"score": 2 / 3, "tests_passed": 2 / 3, "timed_out": 1.0, "no_program": 0.0}


@pytest.mark.tier("all")
def test_all_tests_of_a_response_share_its_time():
    verifier = CodeVerifier(12.0, wall_seconds=1.5, score="share")
    truth = {"inputs": [""] * 50, "outputs": [""] * 50}
    began = time.monotonic()
    outcome = asyncio.run(verifier("```\nwhile True: pass\n```", truth))
    assert (outcome["score"], outcome["timed_out"]) == (0.0, 1.0)
    assert time.monotonic() - began < HANG_SECONDS  # each for itself would take 75 s


def test_a_share_of_the_tests_is_a_share_of_the_score():
    program = "def add(a, b): return 3"
    assert judge(program, CALLS, score="share")["score"] == 0.5
    assert judge(program, ASSERTS, score="share")["score"] == 0.5
    assert judge(program, ASSERTS)["score"] == 0.0
    assert judge("print(3)", SUMS, score="share")["score"] == 0.5
    assert score(program, ASSERTS, max_tests=1) == score(program, CALLS, max_tests=1) == 1.0


def test_a_failed_test_is_the_last_one_unless_each_counts():
    truth = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    program = "n = int(input())\nprint(n if n != 2 else 0)"
    assert judge(program, truth)["tests_passed"] == 1 / 3
    assert judge(program, truth, score="share")["tests_passed"] == 2 / 3


def test_a_failed_assertion_leaves_the_next_ones_their_turn():
    truth = ["assert add(1, 1) == 3", "raise SystemExit", "assert add(1, 1) == 2"]
    assert judge(ADD, truth, score="share")["tests_passed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("no program", None),
        ("```python\nopen", None),
        ("`print(1)` and ```print(2)```", None),
        ("```bash\nls\n```", None),
        ("```python\na\n```\nthen\n```py\nb\n```", "b"),
        ("```\na\n```\nthen\n```\nb\n```", "b"),
        ("```python\na\n```\nIt prints:\n```\n3\n```\nand\n```text\n4\n```", "a"),
        ("1. so:\n   ```Python title\n   if a:\n     b\n   ```", "if a:\n  b"),
        ("````\n```\na\n```\n````", "```\na\n```"),
        ("```python\r\na\r\n```\r\n", "a\r"),
        ("```python\n```", ""),
    ],
)
def test_the_program_is_the_last_block_of_python(text, program):
    assert last_program(text) == program


@given(st.text(alphabet="`a\n p"))
def test_any_text_has_a_program_or_none(text):
    found = last_program(text)
    assert found is None or found in text or " " in text


def test_many_fences_are_read_in_one_go():
    began = time.monotonic()
    assert last_program("````\n" + "```\n" * 200_000) is None
    assert time.monotonic() - began < HANG_SECONDS  # each from the start would take hours


def test_a_response_without_a_program_runs_nothing():
    verifier = CodeVerifier(60.0)
    outcome = asyncio.run(verifier("print(3)", SUMS))
    assert outcome == {"score": 0.0, "tests_passed": 0.0, "timed_out": 0.0, "no_program": 1.0}


MALFORMED = [
    (None, "NoneType"),
    (3, "int"),
    ("assert f() == 1", "not JSON"),
    ([], "at least one"),
    ([1], "list of such texts"),
    (["assert f( == 1"], "is no Python"),
    ({}, "no lists"),
    ({"inputs": [], "outputs": []}, "no pairs"),
    ({"inputs": ["1"], "outputs": []}, "no pairs"),
    ({"inputs": "1", "outputs": "1"}, "no lists"),
    ({"inputs": [1], "outputs": ["1"]}, "no text"),
    ({"inputs": ["1"], "outputs": [1]}, "no text"),
    ({"inputs": ["1"], "output": ["1"]}, "`output`"),
    ({"asserts": [], "fn_name": "f"}, "`fn_name`"),
    ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "no list of arguments"),
    ({"fn_name": "f()", "inputs": [[1]], "outputs": [1]}, "no name"),
    ({"fn_name": "f", "entry_point": "g", "inputs": [[1]], "outputs": [1]}, "no name"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("truth", "words"), MALFORMED)
def test_malformed_tests_are_an_error_even_without_a_program(truth, words):
    with pytest.raises(ValueError, match=words):
        asyncio.run(CodeVerifier(60.0)("nothing", truth))


def test_malformed_tests_are_found_before_the_run_with_their_prompt():
    verifiers = {"code": resolve_verifier(RewardConfig(verifier="code"), "rewards.code")}
    prompts = [Prompt(f"train.jsonl:{n}", "code", None, "", truth) for n, truth in enumerate([SUMS, {"inputs": []}])]
    [problem] = check_prompts({"code": "code"}, verifiers, prompts, "data")
    assert "prompt train.jsonl:1" in str(problem) and "outputs" in str(problem)
    assert check_prompts({"code": "code"}, verifiers, prompts[:1], "data") == []


@pytest.mark.parametrize(
    ("arguments", "settings", "path", "words"),
    [
        ({"scor": "all"}, {}, ".scor", "did you mean `score`?"),
        ({"score": "some"}, {}, ".score", "'all' or 'share'"),
        ({"wall_seconds": 0}, {}, ".wall_seconds", "greater than 0"),
        ({"memory_mib": "much"}, {}, ".memory_mib", "does not fit"),
        ({"max_tests": 0}, {}, ".max_tests", "greater than 0"),
        ({"max_concurrency": -1}, {}, ".max_concurrency", "greater than 0"),
        ({"timeout_seconds": 5}, {}, ".timeout_seconds", "filled by the run"),
        ({"response": "x"}, {}, ".response", "filled by the run"),
        ({"wall_seconds": 55}, {}, "", "do not fit into the `timeout_seconds`"),
        ({}, {"timeout_seconds": 15}, "", "do not fit into the `timeout_seconds`"),
    ],
)
def test_wrong_arguments_are_problems_with_their_path(arguments, settings, path, words):
    with pytest.raises(ConfigError) as caught:
        resolve_verifier(RewardConfig(verifier="code", verifier_args=arguments, **settings), "rewards.x")
    [problem] = caught.value.problems
    assert problem.path == f"rewards.x.verifier_args{path}" and words in str(problem)


def test_a_machine_without_a_sandbox_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr("roll.rewards.code.default_sandbox", lambda: Sandbox(levels=[]))
    verifier = resolve_verifier(RewardConfig(verifier="code"), "rewards.x")
    with pytest.raises(ConfigError, match="rewards.x.verifier: .*no sandbox for untrusted code here"):
        check_machine(verifier, "rewards.x")
    with pytest.raises(SandboxUnavailable):
        asyncio.run(verifier(RewardInput("p", "", "```\n```", SUMS)))


def test_code_is_not_run_where_it_could_read_secrets_unless_asked(monkeypatch):
    made = []
    monkeypatch.setattr("roll.rewards.code.Sandbox", lambda **named: made.append(named))
    CodeVerifier(60.0)
    CodeVerifier(60.0, accept_weak_sandbox=True)
    assert made == [{"accept_weak": True}]


def test_a_fault_of_the_sandbox_is_no_score(monkeypatch):
    assert score(READ, SUMS) == 1.0
    monkeypatch.setattr("roll.sandbox.sandbox._START", "raise SystemExit")
    with pytest.raises(SandboxFailed):
        score(READ, SUMS)


@pytest.mark.tier("all")
def test_a_worker_tells_right_from_wrong_and_names_prompts_with_malformed_tests(make_pool, judged):
    pool = make_pool("code", verifier_args={"score": "share"}, max_retries=0)

    async def use(pool) -> list:
        records = [judged(f"```python\n{ADD}\n```", CALLS), judged("```\ndef add(a, b): return 3\n```", ASSERTS)]
        outputs = await pool.score([*records, judged("?", CALLS)])
        with pytest.raises(RewardFailed, match="train.jsonl:1.*no pairs"):
            await pool.score([judged(ADD, {"inputs": [], "outputs": []})])
        return outputs

    outputs = run_pool(pool, use)
    assert [output.score for output in outputs] == [1.0, 0.5, 0.0]
    assert [output.metrics["no_program"] for output in outputs] == [0.0, 0.0, 1.0]


def test_an_event_loop_off_the_main_thread_runs_programs_too():
    """That of an actor is one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(score(READ, SUMS)))
    thread.start()
    thread.join(60)
    assert found == [1.0]
