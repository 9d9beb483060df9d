"""The method that CONTRIBUTING.md shows passes what the page tells its reader to run. Source: docs/design.md 4.

Quick: the file as it stands, in this process, in the table beside the others. Slow: the page's two changes are made in
a copy of the repository, and its four commands are typed there.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgefl_trainer import cli
from edgefl_trainer.methods import METHODS

NAME = "edgefl_trainer.methods.shown_in_contributing"
FILE = "trainer/edgefl_trainer/methods/lgfedavg.py"
TABLE = "trainer/edgefl_trainer/methods/__init__.py"
OWN = "tests/house/test_contributing.py"
# Folders without a test that goes over the table of methods: reading them takes longer than running the others' few.
LEFT_OUT = (
    *(f"--ignore=tests/{folder}" for folder in ("edge_client", "exchange", "fuzz", "protocol")),
    "--ignore-glob=tests/coordinator/*/*",
)
PACKAGES = ("protocol", "trainer", "export", "edge_client", "coordinator")


def block(root: Path, kind: str) -> str:
    """The only block of a kind in the page's part on adding a method."""
    page = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"^## Add a method\n(.*?)^## ", page, re.M | re.S)
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", part, re.M | re.S)
    return str(found)


def patched(text: str, diff: str) -> str:
    """The text with the added line of each hunk in its place by the alphabet, between the hunk's two other lines.

    Whoever adds a method has a line more, which may stand there too.
    """
    lines = text.splitlines(keepends=True)
    for hunk in diff.split("@@\n"):
        (before, _), (added, sign), (following, _) = ((line[1:], line[0]) for line in hunk.splitlines(keepends=True))
        assert sign == "+" and lines.count(before) == lines.count(following) == 1, hunk
        between = range(lines.index(before) + 1, lines.index(following))
        assert between.start <= between.stop and lines[between.start : between.stop] == sorted(
            lines[between.start : between.stop]
        ), hunk
        if added not in lines:
            lines.insert(next((place for place in between if lines[place] > added), between.stop), added)
    return "".join(lines)


def test_the_page_names_the_files_that_tests_marked_data_open(root: Path, tracked: list[Path]) -> None:
    """Whoever fills a folder from the page, and names it in EDGEFL_DATA, meets no file that is missing."""
    told = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("`EDGEFL_DATA` (")[2].partition(")")[0]
    texts = [(root / path).read_text(encoding="utf-8") for path in tracked if path.match("test_*.py")]
    opened = {
        name for text in texts for name in re.findall(r"(?:real_data|EDGEFL_DATA.\]|rows_of\().*?(\w+\.zip)", text)
    }
    assert set(re.findall(r"\w+\.zip", told)) == opened


@pytest.fixture
def shown(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of the page's Python block, in the table."""
    file = tmp_path / "shown.py"
    file.write_text(block(root, "python"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(NAME, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(METHODS, "lgfedavg", module.LGFedAvg)
    return module.LGFedAvg


def test_the_shown_run_ends_with_a_model_of_every_site(
    root: Path, shown: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's last command: one of three sites takes part in a round, and its reply is the head and nothing else."""
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path / "cache"))
    *_, command = block(root, "sh").splitlines()
    program, *words = shlex.split(command)
    assert program == ".venv/bin/edgefl-train" and words[-2] == "--out"
    out = tmp_path / "run"
    done = CliRunner().invoke(cli.cli, [*words[:-1], str(out), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    trained = [json.loads(line)["site"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(set(trained)) < len(summary["sites"]) == 3
    assert all(site["balanced_accuracy"] is not None for site in summary["sites"].values())
    width, classes, replies, four_bytes = 64, len(summary["classes"]), 1, 4
    head = (width + 1) * classes * replies * four_bytes
    assert head <= summary["bytes_up_per_round"] < 2 * head  # the head and names around it, nothing more
    assert shown.travels == ("weights",)


def test_the_shown_file_is_formatted_and_linted(root: Path) -> None:
    """`make check` says nothing of it."""
    for words in (["check"], ["format", "--check"]):
        line = [sys.executable, "-m", "ruff", *words, "--stdin-filename", str(root / FILE), "-"]
        done = subprocess.run(line, input=block(root, "python"), cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_shown_lines_find_their_place_in_the_table(root: Path) -> None:
    """The diff's context is the file's."""
    text = patched((root / TABLE).read_text(encoding="utf-8"), block(root, "diff"))
    assert "import LGFedAvg\n" in text and '    "lgfedavg": LGFedAvg,\n' in text


def test_the_shown_lines_find_their_place_beside_those_of_a_method_that_a_reader_added(root: Path) -> None:
    """`make rules` failed once a reader's own method stood between `head` and `local`."""
    text, diff = (root / TABLE).read_text(encoding="utf-8"), block(root, "diff")
    for name in ("heads", "lion"):
        line, entry = f"from edgefl_trainer.methods.{name} import Mine\n", f'    "{name}": Mine,\n'
        theirs = text.replace("from edgefl_trainer.methods.local ", f"{line}from edgefl_trainer.methods.local ")
        theirs = theirs.replace('    "local": ', f'{entry}    "local": ')
        found = patched(theirs, diff).splitlines(keepends=True)
        own = "from edgefl_trainer.methods.lgfedavg import LGFedAvg\n"
        assert (found.index(own) > found.index(line)) == (name < "lgfedavg")
        assert (found.index('    "lgfedavg": LGFedAvg,\n') > found.index(entry)) == (name < "lgfedavg")
        assert [one for one in found if one not in (own, '    "lgfedavg": LGFedAvg,\n')] == theirs.splitlines(
            keepends=True
        )


def make_copy(root: Path, folder: Path) -> None:
    """What git tracks, with the environment of this one in `.venv`, which `make` takes for its own.

    Modules bring what Python compiled them to; it counts only where the source has the same time and size.
    """
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for source in (root / name for name in listed.stdout.split("\0") if name):
        compiled = source.parent.glob(f"__pycache__/{source.stem}.*.pyc") if source.suffix == ".py" else ()
        for file in (source, *compiled):
            if file.is_file():
                copied = folder / file.relative_to(root)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copied)
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=folder, capture_output=True, check=True)
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".venv/.installed").unlink(missing_ok=True)
    (folder / ".venv/.installed").touch()


@pytest.mark.slow
@pytest.mark.long
def test_the_page_is_followed_in_a_copy(root: Path, tmp_path: Path) -> None:
    """The file, the two lines, and each command as it is typed ends with status 0."""
    copy = tmp_path / "copy"
    make_copy(root, copy)
    (copy / FILE).write_text(block(root, "python"), encoding="utf-8")
    (copy / TABLE).write_text(patched((copy / TABLE).read_text(encoding="utf-8"), block(root, "diff")))
    commands = block(root, "sh").splitlines()
    assert [command.split()[0] for command in commands] == ["make", "make", "make", ".venv/bin/edgefl-train"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = os.pathsep.join(str(copy / package) for package in PACKAGES)
    environment = {**ours, "PYTHONPATH": paths, "EDGEFL_CACHE": str(tmp_path / "cache"), "MAKEFLAGS": ""}
    environment |= {"WORKERS": "0"}  # a process collects all tests, to run a few: no other beside it
    environment |= {"PYTEST_ADDOPTS": " ".join(LEFT_OUT)}
    environment |= {"MYPY_CACHE_DIR": str(root / ".mypy_cache")}  # a minute, which `make check` need not take again
    passed = []
    for command in commands:
        words = ["bash", "-c", command]
        done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-6000:]}"
        if "-k lgfedavg" in command:
            found = re.search(r"(\d+) passed", done.stdout)
            assert found and "Installing" not in done.stdout, done.stdout[-2000:]
            passed.append(int(found[1]))
            # The second command would try again what the first one tried, and the third one what the page shows.
            ran = [f"--deselect={word}" for word in (*re.findall(r"tests/\S+\.py", command), OWN)]
            environment["PYTEST_ADDOPTS"] = " ".join([*LEFT_OUT, *ran])
    contract, others = passed
    assert contract >= 20 and others >= 10
    assert json.loads((copy / "runs/lgfedavg/summary.json").read_text())["method"] == "lgfedavg"
