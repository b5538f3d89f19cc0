"""Loading: from a YAML file and overrides to a typed configuration, or to every problem at once.

Order: read, lay the file over the defaults, apply `dotted.key=value` overrides, resolve `${...}`, validate against the
dataclasses. Nothing is executed, nothing heavy is imported, and no key is silently ignored. `checks.py` decides if the
values fit together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import OmegaConfGrammarParser, parse
from pydantic import TypeAdapter, ValidationError

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.explain import truth_value_problems, validation_problems
from roll.configs.schema import AgenticConfig, PipelineConfig, RLVRConfig
from roll.configs.structure import PathPart, join
from roll.configs.wording import choose_among, masked, nearest, shown
from roll.configs.yaml_text import MAX_DEPTH, MAX_NODES, dump_yaml, parse_yaml
from roll.tracking.logs import redact

PIPELINES: dict[str, type[PipelineConfig]] = {"rlvr": RLVRConfig, "agentic": AgenticConfig}
"""Value of the key `pipeline` -> its configuration class."""

_UNRESOLVED = object()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read, merge, resolve and validate a configuration. Raises `ConfigError` with every problem found.

    ``overrides`` are ``dotted.key=value`` with the value in YAML; list entries are ``key[0]`` or ``key.0``. A mapping
    is merged into the one in the file, anything else replaces it.
    """
    return _typed(_read_mapping(Path(path)), overrides)


def config_from_tree(tree: dict[str, Any]) -> PipelineConfig:
    """Load a configuration from a tree in memory, such as one built by a test or a sweep; see `load_config`."""
    return _typed(tree, ())


def dump_config(config: PipelineConfig) -> str:
    """Return the resolved configuration as YAML that loads to an equal configuration. Secrets are masked."""
    return dump_yaml(_escaped(masked(asdict(config))))


def told_config(config: PipelineConfig) -> dict[str, Any]:
    """Return the resolved configuration, redacted: secrets are masked by key name and inside texts."""
    return _redacted(masked(asdict(config)))


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_redacted(below) for below in value]
    return redact(value) if isinstance(value, str) else value


def _typed(written: dict[str, Any], overrides: Sequence[str]) -> PipelineConfig:
    cls = _config_class(written, overrides)
    references = _References()
    config = OmegaConf.create(references.vetted(_laid_over(asdict(cls()), written), ()))
    problems = _apply(overrides, config, references)
    tree = references.resolved(config, ())
    problems += references.problems + truth_value_problems(cls, tree) + _pipeline_problems(tree.get("pipeline"))
    known = {problem.path for problem in problems}
    try:
        valid = _adapter(cls).validate_python(tree)  # type: ignore[arg-type]  # mypy: a dataclass is as unhashable as its instances
    except ValidationError as error:
        problems += [item for item in validation_problems(error, cls, tree) if item.path not in known]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return valid


@cache
def _adapter(cls: type[PipelineConfig]) -> TypeAdapter[PipelineConfig]:
    return TypeAdapter(cls)


def _config_class(tree: dict[str, Any], overrides: Sequence[str]) -> type[PipelineConfig]:
    """Return the class of the pipeline; for an unknown name the most likely one, so that its keys are checked."""
    overridden = [text.partition("=")[2].strip() for text in overrides if text.startswith("pipeline=")]
    name = overridden[-1] if overridden else tree.get("pipeline", "rlvr")
    return PIPELINES[nearest(str(name), PIPELINES) or "rlvr"]


def _pipeline_problems(name: Any) -> list[ConfigProblem]:
    if isinstance(name, str) and name in PIPELINES:
        return []
    return [ConfigProblem("pipeline", f"{shown(name)} is no pipeline", choose_among(str(name), PIPELINES))]


def _read_mapping(path: Path) -> dict[str, Any]:
    tree = parse_yaml(_read_text(path), str(path))
    if tree is None:
        raise ConfigError([ConfigProblem(str(path), "the file is empty", "write at least `pretrain` and the data")])
    if not isinstance(tree, dict):
        message = f"the top level is {shown(tree)}, not a mapping"
        raise ConfigError([ConfigProblem(str(path), message, "write `key: value` lines")])
    return tree


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        message, remedy = "there is no such file", f"check the path; the current folder is {Path.cwd()}"
    except IsADirectoryError:
        message, remedy = "is a folder", "give the YAML file itself"
    except UnicodeDecodeError as error:
        message, remedy = f"is not UTF-8 text (byte {error.start})", "save the file as UTF-8"
    except (OSError, ValueError) as error:
        message, remedy = f"cannot be read: {error}", "check the path and its permissions"
    raise ConfigError([ConfigProblem(str(path), message, remedy)])


def _apply(overrides: Sequence[str], config: DictConfig, references: _References) -> list[ConfigProblem]:
    problems: list[ConfigProblem] = []
    for text in overrides:
        try:
            key, value = _split_override(text)
            value = references.vetted(value, (key,))
            if value is not _UNRESOLVED:
                _set(config, key, value)
        except ConfigError as error:
            problems += error.problems
    return problems


def _split_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"(?!-)[^\s.\[\]]+(\.[^\s.\[\]]+|\[[^\s\[\]]+\])*", key):
        remedy = "write dotted.key=value, for example max_steps=10 or rewards.math.tag_included[0]=gsm8k"
        raise ConfigError([ConfigProblem("command line", f"`{text}` is no override", remedy)])
    return key, parse_yaml(value, f"command line, {key}")


def _set(config: DictConfig, key: str, value: Any) -> None:
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        message = f"the override {shown(value, key)} does not fit: {_first_line(error)}"
        remedy = "a list entry is named by the number of an entry that the file has; to change its length give the list"
        raise ConfigError([ConfigProblem(key, message, remedy)]) from error


def _laid_over(defaults: Any, written: Any) -> Any:
    """Return ``written`` with missing keys taken from ``defaults``, at every depth."""
    if not (isinstance(defaults, dict) and isinstance(written, dict)):
        return written
    merged = {key: _laid_over(value, written[key]) if key in written else value for key, value in defaults.items()}
    return merged | {key: value for key, value in written.items() if key not in defaults}


class _References:
    """A resolver of `${...}` that collects the references that are refused or lead nowhere.

    Only other values and `oc.env` may be referred to: other OmegaConf resolvers could import modules. A text is checked
    with the same grammar that resolves it.
    """

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.values = 0

    def vetted(self, value: Any, parts: tuple[PathPart, ...]) -> Any:
        """Return the value without the texts whose references are malformed or refused."""
        if isinstance(value, (dict, list)):
            return _map_below(value, parts, self.vetted)
        if isinstance(value, str) and "${" in value:
            problem = _text_problem(value, parts)
            if problem is not None:
                self.problems.append(problem)
                return _UNRESOLVED
        return value

    def resolved(self, node: Any, parts: tuple[PathPart, ...]) -> Any:
        """Return a plain tree with each reference replaced; references that lead nowhere are left out."""
        self.values += 1
        if len(parts) > MAX_DEPTH or self.values > MAX_NODES:
            message = f"references refer back to themselves, or grow beyond {MAX_NODES} values"
            remedy = "let no section refer to one that refers to it"
            raise ConfigError([*self.problems, ConfigProblem(join(parts[:4]), message, remedy)])
        if not isinstance(node, (DictConfig, ListConfig)):
            return node
        names = list(node) if isinstance(node, DictConfig) else range(len(node))
        found = {name: self.target(node, name, parts) for name in names}
        kept = {name: value for name, value in found.items() if value is not _UNRESOLVED}
        return kept if isinstance(node, DictConfig) else list(kept.values())

    def target(self, node: DictConfig | ListConfig, part: Any, parts: tuple[PathPart, ...]) -> Any:
        path = (*parts, part)
        try:
            value = node[part]
        except (OmegaConfBaseException, RecursionError) as error:
            self.problems.append(ConfigProblem(join(path), _first_line(error), _reference_remedy(error)))
            return _UNRESOLVED
        return self.resolved(value, path)


def _map_below(value: Any, parts: tuple[PathPart, ...], judge: Callable[..., Any]) -> Any:
    """Apply ``judge(value, path)`` to each entry, and leave out the entries it rejects."""
    if isinstance(value, dict):
        pairs = [(key, judge(below, (*parts, key))) for key, below in value.items()]
        return {key: below for key, below in pairs if below is not _UNRESOLVED}
    entries = [judge(below, (*parts, index)) for index, below in enumerate(value)]
    return [below for below in entries if below is not _UNRESOLVED]


def _text_problem(text: str, parts: tuple[PathPart, ...]) -> ConfigProblem | None:
    what = shown(text, str(parts[-1]))
    try:
        names = set(_resolver_names(parse(text)))
    except GrammarParseError:
        remedy = "close the reference with `}`, or write `\\${` for the characters themselves"
        return ConfigProblem(join(parts), f"the reference in {what} cannot be read", remedy)
    if names <= {"oc.env"}:
        return None
    remedy = "only `${other.key}` and `${oc.env:NAME,default}` are resolved"
    return ConfigProblem(join(parts), f"the reference in {what} is refused", remedy)


def _resolver_names(grammar: Any) -> Iterator[str]:
    if isinstance(grammar, OmegaConfGrammarParser.InterpolationResolverContext):
        yield grammar.resolverName().getText()
    for index in range(grammar.getChildCount()):
        yield from _resolver_names(grammar.getChild(index))


def _reference_remedy(error: Exception) -> str:
    if "Environment variable" in str(error):
        return "set the variable, or give a default: `${oc.env:NAME,default}`"
    return "refer by its full path to a key that has a value, and that does not refer back"


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.removeprefix("KeyError raised while resolving interpolation: ").strip('"')


def _escaped(value: Any) -> Any:
    """Escape texts that look like references or missing values, so that they load as themselves."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_escaped(below) for below in value]
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"\\*\?\?\?", value):
        return "\\" + value
    if "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    return value
