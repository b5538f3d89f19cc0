from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import roll
from roll.configs.errors import ConfigError
from roll.data.tokenizer import load_tokenizer


def test_a_saved_tokenizer_is_loaded_as_it_was(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("12+3=")["input_ids"] == tokenizer("12+3=")["input_ids"]
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_a_generic_tokenizer_is_loaded_without_torch(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    script = "import sys; from roll.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
    script += "assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(Path(roll.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment)


@pytest.mark.parametrize("name", ["", "no/such/folder", "/no/such/folder"])
def test_a_missing_model_is_named_with_its_key(name):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(name, config_path="reference.model_args.model_name_or_path")
    (problem,) = caught.value.problems
    assert problem.path == "reference.model_args.model_name_or_path"
    assert name in problem.message


def test_a_broken_tokenizer_file_is_a_problem_of_the_configuration(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer that can be read"):
        load_tokenizer(str(tmp_path))
