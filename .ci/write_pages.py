"""Write the parts of pages that are generated: help texts, the OpenAPI document, the tests of the numbered checks.

    python .ci/write_pages.py               writes docs/reference/commands.md and openapi.json, and the tests in
                                            docs/security.md
    python .ci/write_pages.py --print PAGE  prints what that page should be

A check's tests are the files that name it ("check 9", "checks 17 to 19", "checks 21, 22"); how far it holds is written
by hand before them.
"""

import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import openapi

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "edgefl": "edgefl_client.cli",
    "edgefl-train": "edgefl_trainer.cli",
    "edgefl-export": "edgefl_export.cli",
    "edgefl-coordinator": "edgefl_coordinator.cli",
}
HEAD = """\
# Commands

For whoever looks up an option. Afterwards you know what each command takes. This is the help of every command,
written by `make pages` and compared by the tests.
Exit codes, and what the commands have in common: [design.md](../design.md) 5.
"""
NAMED = re.compile(r"\bchecks?\s+(\d+(?:(?:,\s*|\s+and\s+|,\s+and\s+|\s+to\s+)\d+)*)", re.I)
ROW = re.compile(r"^\| (\d+) \|(.*\| held(?: in part)?: .*?\.) Tests:.*\|$")


def main() -> None:
    """Write all of them, or print one."""
    pages = {
        "docs/reference/commands.md": commands_page,
        "docs/reference/openapi.json": openapi.text,
        "docs/security.md": security_page,
    }
    if sys.argv[1:2] == ["--print"]:
        sys.stdout.write(pages[sys.argv[2]]())
        return
    for name, page in pages.items():
        text = page()
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")


def commands_page() -> str:
    """All help texts."""
    parts = [HEAD]
    for program, module in COMMANDS.items():
        parts.append(f"## {program}\n")
        for path, commands in walk((program,), (root_group(module),)):
            parts.append(f"```\n$ {' '.join(path)} --help\n{help_text(path, commands)}\n```\n")
    return "\n".join(parts)


def root_group(module: str) -> click.Group:
    """The group of a command line that no other group of its module holds."""
    groups = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, click.Group)]
    held = [command for group in groups for command in group.commands.values()]
    (root,) = {id(group): group for group in groups if not any(group is one for one in held)}.values()
    return root


Names = tuple[str, ...]
Chain = tuple[click.Command, ...]  # the command, behind the groups that hold it


def walk(path: Names, chain: Chain) -> Iterator[tuple[Names, Chain]]:
    """A command and everything below it, in name order."""
    yield path, chain
    if isinstance(chain[-1], click.Group):
        for name, command in sorted(chain[-1].commands.items()):
            yield from walk((*path, name), (*chain, command))


def help_text(path: Names, chain: Chain) -> str:
    """What `--help` prints on a terminal of 80 columns."""
    context: click.Context | None = None
    for name, command in zip(path, chain, strict=True):
        settings = {"terminal_width": 78, **command.context_settings}
        context = click.Context(command, info_name=name, parent=context, **settings)
    assert context is not None
    return "\n".join(line.rstrip() for line in chain[-1].get_help(context).splitlines())


def security_page() -> str:
    """docs/security.md with the tests that name each check now."""
    tests = named_checks()
    lines = []
    for line in (ROOT / "docs/security.md").read_text(encoding="utf-8").splitlines():
        row = ROW.match(line)
        if row:
            files = ", ".join(f"`{name}`" for name in sorted(tests.get(int(row[1]), ())))
            line = f"| {row[1]} |{row[2]} Tests: {files} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def named_checks() -> dict[int, set[str]]:
    """Number of a check → the test files that name it."""
    found: dict[int, set[str]] = defaultdict(set)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for numbers in NAMED.findall(file.read_text(encoding="utf-8")):
            for first, last in re.findall(r"(\d+)(?:\s+to\s+(\d+))?", numbers):
                for number in range(int(first), int(last or first) + 1):
                    found[number].add(str(file.relative_to(ROOT / "tests")))
    return found


if __name__ == "__main__":
    main()
