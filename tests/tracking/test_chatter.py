"""What libraries print, from Python, native code and children, goes to files; what our own lines say stays."""

import os
import subprocess
import sys

import pytest

from roll.tracking.logs import native_output_kept

CHATTER = """
def chatter(name):
    os.system(f"echo {name} child")
    os.system(f"echo {name} child error >&2")
    os.write(1, f"{name} native\\n".encode())
    os.write(2, f"{name} native error\\n".encode())
"""

ROLE = (
    "import logging, os, sys; from pathlib import Path\n"
    "from roll.tracking.logs import give_away_output\n"
    + CHATTER
    + """
handler = logging.StreamHandler()
logging.getLogger("library").addHandler(handler)
print("before")
give_away_output(Path(sys.argv[1]), "actor_infer/0")
chatter("engine")
print("printed größer \\ud83d")
print("printed error", file=sys.stderr)
os.kill(os.getpid(), 6)
"""
)

DRIVER = (
    "import logging, os, sys; from pathlib import Path\n"
    "from roll.tracking.logs import native_output_kept\n"
    "from roll.tracking.console import Console\n"
    "from roll.tracking.logs import configure_logging\n"
    + CHATTER
    + """
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
library.propagate = False
another = logging.getLogger("another")
another.addHandler(logging.lastResort)
another.propagate = False
with native_output_kept(Path(sys.argv[1]), "driver"):
    configure_logging(Path(sys.argv[1]), "driver", console=True)
    view = Console("sums", 3)
    view.step({"reward/mean": 0.5}, 1)
    chatter("raylet")
    library.warning("library warns")
    another.warning("another warns")
    logging.getLogger("roll.x").warning("we warn")
    print("a stage prints", flush=True)
    view.close({"status": "success", "steps": 1, "seconds": 1.0})
print("afterwards", flush=True)
chatter("later")
library.warning("library warns again")
another.warning("another warns again")
"""
)


def run(code, folder):
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONUNBUFFERED": ""},  # the streams are buffered, as a user's are
    )


def test_all_that_a_role_and_its_children_print_is_in_its_file_also_when_it_is_killed(tmp_path):
    result = run(ROLE, tmp_path)
    assert result.returncode == -6
    assert (result.stdout, result.stderr) == ("before\n", "")
    assert (tmp_path / "actor_infer_0.out").read_text().splitlines() == [
        "engine child", "engine child error", "engine native", "engine native error",
        "printed größer \\ud83d", "printed error",
    ]  # fmt: skip


def test_the_driver_keeps_its_own_lines_on_the_console_and_libraries_in_a_file(tmp_path):
    result = run(DRIVER, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "step 1/3 | reward 0.500 | 0:00 elapsed", "a stage prints", "success: 1 steps in 0:01", "afterwards",
        "later child", "later native",
    ]  # fmt: skip
    assert "roll.x: we warn" in result.stderr and "warns\n" not in result.stderr
    assert result.stderr.endswith("later child error\nlater native error\nlibrary warns again\nanother warns again\n")
    assert (tmp_path / "driver.out").read_text().splitlines() == [
        "raylet child", "raylet child error", "raylet native", "raylet native error", "library warns",
        "another warns",
    ]  # fmt: skip


def test_a_stream_that_somebody_else_has_put_there_stays(tmp_path, capsys):
    with native_output_kept(tmp_path, "driver"):
        print("captured")
        os.write(1, b"native\n")
    assert capsys.readouterr().out == "captured\n"
    assert (tmp_path / "driver.out").read_text() == "native\n"


def test_the_output_comes_back_after_a_failure(tmp_path, capfd):
    with pytest.raises(RuntimeError), native_output_kept(tmp_path, "driver"):
        os.write(1, b"hidden\n")
        raise RuntimeError
    os.write(1, b"seen\n")
    assert capfd.readouterr().out == "seen\n"


def test_a_file_that_cannot_be_opened_is_named_and_nothing_is_redirected(tmp_path, capfd):
    (tmp_path / "logs").write_text("")
    with pytest.raises(OSError, match="logs/driver.out"), native_output_kept(tmp_path / "logs", "driver"):
        pass
    os.write(1, b"seen\n")
    assert capfd.readouterr().out == "seen\n"


READER_WENT_AWAY = """
import sys
from pathlib import Path
from roll.tracking.logs import native_output_kept
from roll.tracking.files import say
with native_output_kept(Path(sys.argv[1]), "driver"):
    sys.stdin.readline()  # nobody reads any more
    for _ in range(3):
        say("lost")
        sys.stdout.write("lost, too")
say("lost as well")
sys.exit(7)
"""


def test_a_reader_that_went_away_changes_no_exit_code(tmp_path):
    command = [sys.executable, "-c", READER_WENT_AWAY, str(tmp_path)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    process.stdout.close()
    process.stdout = None
    assert process.communicate("go on\n", timeout=60)[1] == ""
    assert process.returncode == 7
