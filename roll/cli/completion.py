"""`roll completion SHELL`: prints a script that completes commands, YAML files and dotted keys in bash, zsh or fish.

The script contains every key, so completing does not start Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from roll.cli.main import COMMANDS, command_parser
from roll.configs.fields import walk
from roll.configs.loader import PIPELINES
from roll.configs.roles import UNREAD_PATHS

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# eval "$(roll completion bash)", or put this into ~/.local/share/bash-completion/completions/roll
_roll() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --config --help" -- "$word"))
    elif [ "$COMP_CWORD" -eq 2 ] && [ "${{COMP_WORDS[1]}}" = completion ]; then
        COMPREPLY=($(compgen -W "{shells}" -- "$word"))
    elif [ "$COMP_CWORD" -eq 2 ] && [[ " serve chat doctor report " == *" ${{COMP_WORDS[1]}} "* ]]; then
        COMPREPLY=($(compgen -d -S / -- "$word"))
        compopt -o nospace
    elif [ "$COMP_CWORD" -eq 2 ]; then
        COMPREPLY=($(compgen -f -X '!*.y*ml' -- "$word") $(compgen -d -S / -- "$word"))
        compopt -o nospace
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "--exact --gpu-memory --help --max-lag --tune" -- "$word"))
    else
        COMPREPLY=($(compgen -W "{keys}" -- "$word"))
        compopt -o nospace
    fi
}}
complete -F _roll roll
"""
_ZSH = """\
#compdef roll
# put this into a folder of $fpath as _roll, or: eval "$(roll completion zsh)" after compinit
_roll() {{
    if (( CURRENT == 2 )); then
        compadd -- {commands} --config --help
    elif (( CURRENT == 3 )) && [[ ${{words[2]}} == completion ]]; then
        compadd -- {shells}
    elif (( CURRENT == 3 )) && [[ ${{words[2]}} == (serve|chat|doctor|report) ]]; then
        _files -/
    elif (( CURRENT == 3 )); then
        _files -g '*.y*ml'
    else
        compadd -S '' -- --exact --gpu-memory --max-lag --tune {keys}
    fi
}}
compdef _roll roll
"""
_FISH_HEAD = """\
# roll completion fish > ~/.config/fish/completions/roll.fish
complete -c roll -f
"""


def main(arguments: Sequence[str]) -> int:
    """Print the completion script of a shell; return the exit code."""
    parser = command_parser("completion", 'Print a completion script: eval "$(roll completion bash)".')
    parser.add_argument("shell", choices=SHELLS)
    print(script(parser.parse_args(arguments).shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the completion script of a shell."""
    if shell == "fish":
        return _fish()
    template = _BASH if shell == "bash" else _ZSH
    return template.format(commands=" ".join(COMMANDS), shells=" ".join(SHELLS), keys=" ".join(completed_keys()))


def completed_keys() -> list[str]:
    """Return every key with a fixed path, each followed by ``=``."""
    paths = {path for cls in PIPELINES.values() for path, _, _ in walk(cls, without=UNREAD_PATHS)}
    plain = [path for path in paths if not set(path) & set("<>[]*")]
    return sorted(f"{path}=" for path in plain if not any(other.startswith(f"{path}.") for other in plain))


def _fish() -> str:
    first = "__fish_use_subcommand"
    lines = [f"complete -c roll -n {first} -a {name} -d '{command.help}'" for name, command in COMMANDS.items()]
    lines.append(f"complete -c roll -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'")
    lines.append(
        "complete -c roll -n '__fish_seen_subcommand_from advise serve chat doctor report' "
        "-a '(__fish_complete_directories)'"
    )
    configured = "__fish_seen_subcommand_from train check simulate advise check-agent"
    lines.append(f"complete -c roll -n '{configured}' -k -a '(__fish_complete_suffix .yaml)'")
    lines.append(f"complete -c roll -n '{configured}' -a '{' '.join(completed_keys())}'")
    return _FISH_HEAD + "\n".join(lines) + "\n"
