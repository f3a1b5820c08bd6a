"""``completion``: scripts that let a shell complete verbs, options, tiers, runs and steps; and what they ask.

The scripts know verbs and options by themselves, so that most presses of Tab start no Python. For names of a store they ask
``tierstore complete-names``, which reads local folders only where it can, answers within a second or so, and says nothing on an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from tierstore.cli.options import Cli
from tierstore.cli.render import wrapped
from tierstore.errors import UsageError

__all__ = ["completion", "verb_table"]

_PLACES: Mapping[str, Path] = {
    "bash": Path(".local/share/bash-completion/completions/tierstore"),
    "zsh": Path(".zfunc/_tierstore"),
    "fish": Path(".config/fish/completions/tierstore.fish"),
}
"""Where each shell looks, below the home."""

_AFTERWARDS: Mapping[str, str] = {
    "bash": "bash-completion reads it in every new shell; without that package: echo 'source ~/{place}' >> ~/.bashrc",
    "zsh": "put before compinit in ~/.zshrc: fpath=(~/.zfunc $fpath)",
    "fish": "fish reads it in every new shell",
}

_NAMED = {"--tier": "tiers", "--to": "tiers", "--run": "runs"}
"""Options whose values are names of the store."""

_FILES = ("--config", "-c", "--policy", "--rename", "--rules", "--config-from", "--directory", "-d")
_REFS = ("REF", "REF…", "[REF]...", "[REF…]", "A", "B")


def completion(
    cli: Cli,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Which shell.")],
    install: Annotated[bool, typer.Option("--install", help="Write it where the shell finds it, below your home.")] = False,
) -> int:
    """Print the script that completes tierstore's verbs, options, tiers, runs and steps in a shell; or put it in its place."""
    if shell not in _PLACES:
        raise UsageError(f"there is no completion for {shell!r}", hint="it is there for bash, zsh and fish")
    script = _script(shell)
    if not install:
        cli.terminal.emit({"type": "completion", "shell": shell, "script": script, "path": None})
        if not cli.terminal.as_json:
            sys.stdout.write(script)
        return 0
    place = Path.home() / _PLACES[shell]
    if not cli.options.dry_run:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script)
    cli.terminal.emit({"type": "completion", "shell": shell, "script": script, "path": str(place)})
    cli.terminal.show(f"{'would write' if cli.options.dry_run else 'wrote'} {place}")
    cli.terminal.show(wrapped(_AFTERWARDS[shell].format(place=_PLACES[shell])))
    return 0


def verb_table() -> dict[str, tuple[str, tuple[tuple[str, bool, str], ...], bool]]:
    """Verb → (what it does, its options as (name, whether a value follows, what it does), whether references follow)."""
    from tierstore.cli.main import app  # this module's verb is one of the table's

    group: Any = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        if command.hidden:
            continue
        options = []
        for parameter in command.params:
            if parameter.param_type_name == "option":
                takes = not (parameter.is_flag or parameter.count)
                options += [(text, takes, _first_line(parameter.help)) for text in parameter.opts]
        options.append(("--help", False, "Say what the verb does."))
        refs = any(p.param_type_name == "argument" and str(p.metavar) in _REFS for p in command.params)
        found[name] = (_first_line(command.help), tuple(options), refs)
    return found


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0].split(". ")[0].rstrip(".")


def _script(shell: str) -> str:
    table = verb_table()
    return _fish(table) if shell == "fish" else _bash(table, zsh=shell == "zsh")


def _bash(table: Mapping[str, tuple[str, tuple[tuple[str, bool, str], ...], bool]], *, zsh: bool) -> str:
    """One function for both: zsh runs it through bashcompinit."""
    common = [text for text, _, _ in next(iter(table.values()))[1]]
    valued = sorted({text for _, options, _ in table.values() for text, takes, _ in options if takes})
    cases = "\n".join(f"        {verb}) options='{' '.join(text for text, _, _ in options)}' ;;" for verb, (_, options, _) in table.items())
    refs = "|".join(verb for verb, (_, _, takes) in table.items() if takes)
    everywhere = [text for text in common if all(text in [t for t, _, _ in options] for _, options, _ in table.values())]
    head = "#compdef tierstore\nautoload -Uz bashcompinit && bashcompinit\n" if zsh else ""
    space = "" if zsh else '    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" != *@ ]]; then COMPREPLY[0]+=" "; fi\n'
    tail = "" if zsh else " 2>/dev/null || complete -o default -F _tierstore tierstore"
    emulate = "    emulate -L ksh\n" if zsh else ""
    nospace = "-o nospace " if not zsh else ""
    return f"""{head}# Completion of tierstore, made by `tierstore completion {"zsh" if zsh else "bash"}`: make it anew after an upgrade.
_tierstore() {{
{emulate}    local line="${{COMP_LINE:0:$COMP_POINT}}" current="" previous="" verb="" options="" expects="" word
    local -a words
    set -f
    words=($line)
    set +f
    local -a asked=("${{words[0]}}" complete-names)
    if [[ "$line" != *[[:space:]] ]]; then
        current="${{words[$(( ${{#words[@]}} - 1 ))]}}"
        words=("${{words[@]:0:$(( ${{#words[@]}} - 1 ))}}")
    fi
    for word in "${{words[@]:1}}"; do
        case "$previous" in -c|--config) asked+=(-c "$word") ;; --run) asked+=(--run "$word") ;; esac
        case "$previous" in --tier) [[ "$word" == */* ]] && asked+=(--tier "$word") ;; esac
        case "$previous" in {"|".join(valued)}) ;; *)
            case "$word" in -*) ;; *) [[ -z "$verb" ]] && verb="$word" ;; esac ;;
        esac
        previous="$word"
    done
    expects="$previous"
    case "$verb" in
        "") options='{" ".join(everywhere)}' ;;
{cases}
    esac
    COMPREPLY=()
    case "$expects" in
        {"|".join(name for name in _NAMED if _NAMED[name] == "tiers")}) word="$("${{asked[@]}}" tiers 2>/dev/null)" ;;
        --run) word="$("${{asked[@]}}" runs 2>/dev/null)" ;;
        {"|".join(_FILES)}) COMPREPLY=($(compgen -f -- "$current")); return ;;
        --level) word="quick sample full" ;;
        {"|".join(v for v in valued if v not in (*_NAMED, *_FILES, "--level"))}) return ;;
        *)
            if [[ "$current" == -* ]]; then word="$options"
            elif [[ -z "$verb" ]]; then word="{" ".join(table)}"
            else
                case "$verb" in
                    {refs}) word="$("${{asked[@]}}" refs "$current" 2>/dev/null)" ;;
                    ls) word="$("${{asked[@]}}" runs 2>/dev/null)" ;;
                    completion) word="bash zsh fish" ;;
                    *) COMPREPLY=($(compgen -f -- "$current")); return ;;
                esac
            fi ;;
    esac
    COMPREPLY=($(compgen -W "$word" -- "$current"))
    # bash breaks words at @ : and =, and completes only what follows the last of them, or begins with an @.
    local last="${{current##*[@:=]}}"
    local kept="${{current:0:$(( ${{#current}} - ${{#last}} ))}}"
    kept="${{kept%@}}"
    if [[ -n "$kept" && "${{COMP_WORDBREAKS-}}" == *@* ]]; then COMPREPLY=("${{COMPREPLY[@]#"$kept"}}"); fi
{space}}}
complete {nospace}-F _tierstore tierstore{tail}
"""


def _fish(table: Mapping[str, tuple[str, tuple[tuple[str, bool, str], ...], bool]]) -> str:
    lines = [
        "# Completion of tierstore, made by `tierstore completion fish`: make it anew after an upgrade.",
        "function __tierstore_names",
        "    set -l words (commandline -opc)",
        "    set -l asked complete-names",
        "    for n in (seq 2 (count $words))",
        "        switch $words[(math $n - 1)]",
        "            case -c --config; set -a asked -c $words[$n]",
        "            case --run; set -a asked --run $words[$n]",
        "        end",
        "    end",
        "    command tierstore $asked $argv (commandline -ct) 2>/dev/null | string split ' '",
        "end",
        "complete -c tierstore -f",
    ]

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    for verb, (does, options, refs) in table.items():
        lines.append(f"complete -c tierstore -n __fish_use_subcommand -a {verb} -d {quoted(does)}")
        seen = f"-n '__fish_seen_subcommand_from {verb}'"
        for text, takes, told in options:
            name = f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}"
            values = (
                f" -x -a '(__tierstore_names {_NAMED[text]})'" if text in _NAMED else " -r -F" if text in _FILES else " -x" if takes else ""
            )
            lines.append(f"complete -c tierstore {seen} {name}{values} -d {quoted(told)}")
        if refs:
            lines.append(f"complete -c tierstore {seen} -a '(__tierstore_names refs)'")
    lines.append("complete -c tierstore -n '__fish_seen_subcommand_from ls' -a '(__tierstore_names runs)'")
    lines.append("complete -c tierstore -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'")
    return "\n".join(lines) + "\n"
