"""`import roll` is quick, needs nothing heavy, and offers all that it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import roll

CODE = """
import sys, time
before = time.process_time()
import roll
dir(roll)
print(time.process_time() - before)
print(" ".join(sorted({"torch", "ray", "numpy", "pydantic", "transformers", "omegaconf"} & set(sys.modules))))
"""


def test_the_import_is_quick_and_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.split("\n")[:2]
    assert float(seconds) < 0.2 and loaded == ""


def test_a_configuration_is_read_without_torch():
    code = "import sys, roll\nroll.load_config({'max_steps': 3})\nprint({'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_name_is_there():
    for name in roll.__all__:
        assert getattr(roll, name) is not None, name
    assert callable(roll.train) and isinstance(roll.__version__, str)
    assert set(roll.__all__) <= set(dir(roll))


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="trian"):
        _ = roll.trian
