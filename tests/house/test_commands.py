"""The four commands: help in the base install, quick starts, no heavy import. Source: docs/design.md 2, 5 and 8."""

import importlib
import re
import sys
from collections.abc import Iterator

import click
import pytest

from edgefl_protocol.distribution import VERSION

COMMANDS = {
    "edgefl": "edgefl_client.cli",
    "edgefl-train": "edgefl_trainer.cli",
    "edgefl-export": "edgefl_export.cli",
    "edgefl-coordinator": "edgefl_coordinator.cli",
}
HEAVY = (
    "torch", "timm", "onnx", "sklearn", "scipy", "matplotlib", "sqlalchemy", "onnxruntime", "rich", "tomli_w",
    "jaxtyping",
)  # fmt: skip
OF_A_DEVICE = ("numpy", "PIL", "cryptography", "requests", "sqlite3")  # installed, but slow to load on a small machine


def entry(module: str) -> click.Group:
    """The command group of a console command, however its `main` wraps it."""
    found = importlib.import_module(module)
    groups = [value for value in vars(found).values() if isinstance(value, click.Group) and value.name != "trust"]
    roots = [g for g in groups if not any(g in other.commands.values() for other in groups)]
    assert len(roots) == 1, f"{module} has {len(roots)} command groups"
    return roots[0]


def every_command(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A group, its commands, and theirs."""
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name), command


ALL = [one for name, module in COMMANDS.items() for one in every_command(entry(module), (name,))]


@pytest.mark.parametrize(("path", "found"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_help_is_complete(path: tuple[str, ...], found: click.Command) -> None:
    """docs/design.md 5: every command says what it does, every option what it means, numbers their default."""
    assert found.help or found.callback.__doc__
    for parameter in found.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            where = f"{' '.join(path)} {parameter.opts[0]}"
            assert parameter.help, f"{where} has no help"
            assert len(re.sub(r"\[default:.*", "", parameter.help, flags=re.DOTALL).split()) >= 3, (
                f"{where} says nothing"
            )
            if parameter.opts[0] == "--passphrase-file":  # the variable holds no file's name
                assert "the passphrase itself in EDGEFL_KEY_PASSPHRASE" in parameter.help, where
            if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool):
                assert parameter.show_default or "default" in parameter.help, f"{where} hides its default"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_nothing_heavy(name: str, command) -> None:
    """docs/design.md 2: `--help` answers without the extras, so no command's may even try to import them."""
    paths = [path for path, _ in ALL if path[0] == name]
    heavy = HEAVY + OF_A_DEVICE * (name == "edgefl")
    code = (
        "import sys\n"
        f"from {COMMANDS[name]} import main\n"
        f"for path in {paths}:\n"
        "    sys.argv = [*path, '--help']\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code, (path, end.code)\n"
        f"    loaded = [n for n in {heavy} if n in sys.modules]\n"
        "    assert not loaded, (path, loaded)\n"
    )
    done = command(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines() if line.startswith("Usage:")]
    assert [tuple(words[1 : 1 + len(path)]) for words, path in zip(told, paths, strict=True)] == paths


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_word_is_one_sentence_and_status_2(name: str, command) -> None:
    """docs/design.md 5: usage errors end with 2, and never with a traceback."""
    done = command(name, "no-such-command")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no-such-command" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_version(name: str, command) -> None:
    """It names the distribution, which is not called like the command: `edgefl` on the index is another project."""
    done = command(name, "--version")
    assert done.returncode == 0 and done.stdout == f"{name}, from edgefl-derm {VERSION}\n"


GROUPS = [(path, found) for path, found in ALL if isinstance(found, click.Group)]


@pytest.mark.parametrize(("path", "group"), GROUPS, ids=[" ".join(path) for path, _ in GROUPS])
def test_one_line_helps_are_whole_sentences(path: tuple[str, ...], group: click.Group) -> None:
    """docs/design.md 1: a person reads the list of commands first, so no line of it is cut off in a terminal of 80."""
    room = 78 - 6 - max(map(len, group.commands))  # click's own sum: width, indents, the longest name
    for name, command in group.commands.items():
        line = command.get_short_help_str(room)
        assert re.fullmatch(r"[A-Z].+\.", line) and not line.endswith("..."), f"{' '.join(path)} {name}: {line}"
