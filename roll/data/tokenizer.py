"""Loader of a model's tokenizer, from its folder or from the model hub.

A folder whose tokenizer needs no class of its own is read without importing torch (under a second); every other one
goes through `AutoTokenizer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from roll.configs.plugins import problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Tokenizer classes that `tokenizer.json` describes completely."""

HUB_PROBE_SECONDS = 3.0


def load_tokenizer(
    name_or_path: str, *, trust_remote_code: bool = False, config_path: str = "pretrain"
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder, or of a name on the model hub.

    ``config_path`` is the key that named the model. Raises `ConfigError` if the folder or name does not exist, or has
    no readable tokenizer.
    """
    folder = Path(name_or_path)
    if not name_or_path:
        raise problem(config_path, "no model is named", "give the folder or the hub name of a model")
    if not folder.is_dir():
        _require_on_hub(name_or_path, config_path)
    try:
        if _is_generic(folder):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(name_or_path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as cause:  # the tokenizer libraries raise bare Exception for a broken file
        first_line = str(cause).strip().split("\n")[0]
        raise problem(
            config_path,
            f"`{name_or_path}` has no tokenizer that can be read ({type(cause).__name__}: {first_line})",
            "name a model folder with `tokenizer.json` and `tokenizer_config.json`, as `save_pretrained` writes them",
        ) from cause


def _is_generic(folder: Path) -> bool:
    config_file = folder / "tokenizer_config.json"
    if not config_file.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    settings = json.loads(config_file.read_text(encoding="utf-8"))
    return settings.get("tokenizer_class") in GENERIC_CLASSES and "auto_map" not in settings


def _require_on_hub(name: str, config_path: str) -> None:
    """Raise `ConfigError` unless a name is cached or on the hub. Probes only once: library retries take a minute."""
    from huggingface_hub import model_info, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str):
            model_info(name, timeout=HUB_PROBE_SECONDS)
    except Exception as cause:  # no valid name, not found, not allowed or offline: each HTTP library has its own types
        first_line = str(cause).strip().split("\n")[0]
        raise problem(
            config_path,
            f"`{name}` is no folder, and could not be fetched from the hub ({type(cause).__name__}: {first_line})",
            "give an existing folder, or the name of a model on the hub that this machine can reach",
        ) from cause
