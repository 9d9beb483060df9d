"""A wrong name, option, path or key is refused before PyTorch is imported, which takes seconds.

No clock: what counts is which modules a process has imported. Source: docs/design.md 8, "Start-up is part of the
product: nothing heavy is imported before it is used".
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from edgefl_trainer.declared_names import method_names, setting_types
from edgefl_trainer.declared_ranges import check_range
from edgefl_trainer.engine.hyper_parameters import build, hyper_types
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods import METHODS

HEAVY = ("torch", "timm", "scipy", "sklearn", "matplotlib")
DATA = "lesions:sites=2,images=40"
TABLE = str(Path(__file__).parents[2] / "experiments" / "fedevprompt-table-1.toml")
RUN = ("run", "fedevprompt", "--out", "new")
WRONG = [
    (("run", "fedevpromt", "--data", DATA, "--out", "new"), "did you mean fedevprompt"),
    ((*RUN, "--data", "foldr:x"), "did you mean folder:x?"),
    ((*RUN, "--data", "folder:nosuch"), "No folder or zip file at nosuch"),
    ((*RUN, "--data", "manifest:nosuch.csv"), "No manifest at nosuch.csv"),
    ((*RUN, "--data", DATA, "--set", "lr_haed=1"), "Did you mean lr_head?"),
    ((*RUN, "--data", "folder:nosuch", "--task", "A=B"), "Task 'A=B' is not known"),  # before anything is read
    ((*RUN, "--data", DATA, "--set", "lr_head"), "write KEY=VALUE"),
    ((*RUN, "--data", DATA, "--set", "lr_head=fast"), "lr_head takes a number"),
    ((*RUN, "--data", DATA, "--set", "lr_head=7"), "lr_head is 7.0; allowed: 0 to 1."),
    ((*RUN, "--data", DATA, "--set", "readout=max"), "readout is one of auto, cls, mean"),
    ((*RUN, "--data", DATA, "--set", "lr_b=-1"), "lr_b is -1.0; allowed: 0 to 1."),  # of a table of ranges
    ((*RUN, "--data", DATA, "--set", "lr_b=nan"), "lr_b is nan; allowed: 0 to 1."),
    ((*RUN, "--data", DATA, "--set", "batch=0"), "batch is 0; allowed: 1 to 65536."),
    ((*RUN, "--data", DATA, "--set", "prefix=-3"), "prefix is one of after, before"),  # a type that has a name
    ((*RUN, "--data", DATA, "--set", "augment=flip"), "augment is one of none, dihedral"),  # of the protocol
    (("run", "fedprox", "--data", DATA, "--out", "new", "--set", "mu=11"), "mu is 11.0; allowed: 0 to 10."),  # compared
    (("run", "fedmae", "--data", DATA, "--out", "new", "--set", "keep_local=x"), "keep_local is one of class_token,"),
    ((*RUN, "--data", DATA, "--config", "wide.toml"), "batch is 0; allowed: 1 to 65536."),
    ((*RUN, "--data", DATA, "--site", "a"), "so it takes no --site; for one site alone end the data's SPEC in @site=a"),
    ((*RUN, "--data", DATA, "--rounds", "0"), "rounds is 0; allowed: at least 1"),
    ((*RUN, "--data", DATA, "--labels", "2"), "labels is 2.0; allowed: above 0, at most 1"),
    ((*RUN, "--data", DATA, "--task", "A=B"), "Task 'A=B' is not known; allowed: all, nevus, or NAME=A,B:REST"),
    ((*RUN, "--data", DATA, "--preset", "big"), "'big' is not one of 'tiny', 'bench84', 'paper'"),
    ((*RUN, "--data", DATA, "--backbone", "tny"), "there is no backbone 'tny'"),
    ((*RUN, "--data", DATA, "--backbone", "run:nosuch"), "there is no backbone at nosuch/backbone.safetensors"),
    ((*RUN, "--data", DATA, "--backbone", "file:/nowhere.npz"), "file:PATH names a file of EdgeFL's own"),
    ((*RUN, "--data", "lesions:sites=0"), "lesions:sites=0 is not allowed"),
    ((*RUN, "--data", "lesions:image=40"), "has the unknown option image"),
    (("run", "random-init", "--data", DATA, "--set", "lr=1", "--out", "new"), "this method has no hyper-parameters"),
    (("run", "local", "--data", DATA, "--out", "."), "name a new or empty folder with --out"),
    (("run", "local", "--data", DATA, "--out", "begun"), "already holds a run: add --resume"),
    (("evaluate", "nosuch", "--data", DATA), "nosuch is not a run directory"),
    (("evaluate", "finished", "--data", "foldr:x"), "did you mean folder:x?"),
    (("evaluate", "finished", "--data", DATA, "--site", "c"), "has no model of site 'c'; it has a."),
    (("predict", "finished", "a.png", "--site", "c"), "has no model of site 'c'; it has a."),
    (("predict", "begun", "a.png", "--site", "a"), "the run in begun is not finished"),
    (("table", "nosuch"), "nosuch is not a run directory"),
    (("finetune", "nosuch", "--mode", "local", "--labels", "0.1", "--out", "new"), "nosuch is not a run directory"),
    (
        ("finetune", "finished", "--mode", "local", "--labels", "0.1", "--out", "new", "--set", "lrr=1"),
        "there is no key 'lrr'",
    ),
    (("methods", "nosuch"), "there is no method 'nosuch'"),
    (("partition", "--data", "foldr:x", "--scheme", "iid", "--sites", "2", "-o", "p.json"), "did you mean folder:x?"),
    (("data", "foldr:x"), "did you mean folder:x?"),
    (("join", "nosuch", "--data", DATA, "--out", "new"), "there is no file nosuch"),
    (("experiment", "nosuch.toml", "--out", "new"), "'nosuch.toml' does not exist."),
    (("experiment", TABLE.replace("table", "tabl"), "--out", "new"), f"does not exist; did you mean {TABLE}?"),
    (("experiment", TABLE, "--out", "new", "--rows", "nosuch"), "nosuch"),
    (("experiment", TABLE, "--out", "new", "--seeds", "x"), "use whole numbers"),
]
ABSENT = ("No folder", "No manifest", "there is no file")  # a failure, status 1: the command itself is right
PROBE = f"""
import contextlib, io, json, sys
from edgefl_trainer import cli
for arguments in json.loads(sys.stdin.read()):
    sys.argv, told = ["edgefl-train", *arguments], io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    print(json.dumps([code, told.getvalue(), [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def asked(commands, folder):
    """Exit status, text, and the extra's modules so far, of one command after the other in one fresh process."""
    found = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_what_is_mistyped_is_refused_without_pytorch(tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_text("")
    (tmp_path / "wide.toml").write_text("[hyper]\nbatch = 0\n")
    (tmp_path / "finished").mkdir()
    for name in ("config.toml", "summary.json"):
        (tmp_path / "finished" / name).write_text("")
    (tmp_path / "finished" / "models").mkdir()
    (tmp_path / "finished" / "models" / "a.safetensors").write_bytes(b"")
    answers = asked([arguments for arguments, _ in WRONG], tmp_path)
    assert len(answers) == len(WRONG)
    for (arguments, words), (code, told, heavy) in zip(WRONG, answers, strict=True):
        assert words in told and code == (1 if words.startswith(ABSENT) else 2), (arguments, told)
        assert told.count("\n") == 1 or told.startswith("Usage: "), (arguments, told)
        assert not heavy, (arguments, heavy)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_method_that_exists_still_needs_it(tmp_path):
    """So the tests above look at the modules that count."""
    [[code, _, heavy]] = asked([["methods", "local"]], tmp_path)
    assert code == 0 and "torch" in heavy


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_text_names_what_the_class_has(name):
    """Else a key that there is would be refused; a method that is added is looked at, too."""
    types, known = setting_types(name), hyper_types(METHODS[name])
    assert types is None or types.keys() == known.keys(), name
    assert types is None or all(types[key] in (kind, str) for key, kind in known.items()), name


def test_the_types_that_are_written_out_are_understood():
    types = setting_types("fedevprompt")
    assert types is not None and (types["lr_head"], types["batch"], get_args(types["readout"])) == (
        float, int, ("auto", "cls", "mean"),
    )  # fmt: skip


NUMBERS = (-1e12, -1, 0, 1e-9, 0.5, 1, 2, 64, 1e5, 1e12, math.nan)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_text_refuses_what_the_class_refuses(name):
    """Oracle: the class itself. It may refuse more; what the text refuses, it refuses with the same sentence."""
    for key, kind in (setting_types(name) or {}).items():
        for value in map(kind, NUMBERS) if kind is float else map(int, NUMBERS[:-1]) if kind is int else ():
            try:
                check_range(name, key, value)
            except SettingError as error:
                with pytest.raises(SettingError) as refused:
                    build(METHODS[name], {key: value})
                assert str(refused.value) == str(error), (key, value)


def test_most_methods_are_understood_from_their_text():
    assert sum(setting_types(name) is not None for name in METHODS) >= len(METHODS) / 2


def test_a_method_that_was_added_to_the_loaded_table_is_one(monkeypatch):
    monkeypatch.setitem(METHODS, "added", METHODS["local"])
    assert "added" in method_names() and setting_types("added") is None
