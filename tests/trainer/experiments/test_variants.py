"""Runs of one method are told apart by the settings in which they differ, and by nothing else."""

import json
from dataclasses import replace
from pathlib import Path

from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.experiments.variants import told_apart, unlike_settings
from edgefl_trainer.methods.fedavg import FedAvg


def run(method="fedavg", *, label=None, sha=None, **settings) -> FinishedRun:
    given = RunSettings(**{"method": method, "data": ("lesions:",), **settings})
    summary = {"method": method, "preset": given.preset, "rounds": given.rounds, "seed": given.seed}
    summary |= {"settings_sha256": sha or given.digest_but_seed(), **({"label": label} if label else {})}
    return FinishedRun(Path("runs/a"), given, summary, {})


def names(*runs: FinishedRun) -> list[str]:
    """The labels; of a run that needs none, its method."""
    found = [summary.get("label", summary["method"]) for summary in told_apart(runs)]
    again = [summary.get("label", summary["method"]) for summary in told_apart(runs[::-1])]
    assert again == found[::-1]  # not by order
    return found


def test_a_setting_that_differs_stands_behind_the_method():
    usual, other = run(hyper={"lr_head": 0.002}), run(hyper={"lr_head": 0.01})
    assert names(usual, other, run("local", hyper={"lr_head": 0.3})) == [
        "fedavg, lr_head=0.002",
        "fedavg, lr_head=0.01",
        "local",
    ]
    assert names(run(), other)[0] == f"fedavg, lr_head={hyper_values(FedAvg())['lr_head']}"  # its default
    assert names(run(), run(balance="class")) == ["fedavg, balance=none", "fedavg, balance=class"]
    assert names(usual, usual) == ["fedavg", "fedavg"]  # `#2` is the table's


def test_a_model_that_sees_no_picture_is_never_just_its_method():
    """docs/methods.md 11.1: it is the row to beat, also where no other run of its method stands beside it."""
    data = ("vqa-rad:x.zip",)
    seen, hidden = run("local", data=data), run("local", data=data, hyper={"picture": "hidden"})
    assert names(hidden, run("pfl-vqa", data=data)) == ["local, picture=hidden", "pfl-vqa"]
    assert names(hidden) == ["local, picture=hidden"] and names(seen) == ["local"]
    assert names(seen, hidden) == ["local, picture=seen", "local, picture=hidden"]
    both = [run("local", data=data, seed=seed, hyper={"picture": "hidden"}, sha="a") for seed in (0, 1)]
    assert names(*both) == ["local, picture=hidden"] * 2


def test_seeds_are_no_variants_also_where_each_has_files_of_its_own():
    """docs/design.md 5, `settings_sha256`: partitions and backbones may differ by their seed."""
    runs = [
        run(seed=seed, partition=f"p{seed}.json", hyper={"lr_head": rate}, sha=f"{rate}")
        for seed in (0, 1)
        for rate in (0.1, 0.2)
    ]
    assert names(*runs) == ["fedavg, lr_head=0.1", "fedavg, lr_head=0.2"] * 2
    assert names(runs[0], runs[2]) == ["fedavg", "fedavg"]


def test_defaults_that_a_version_changed_make_variants(tmp_path):
    """docs/reference/runs.md, `inputs.json`: neither run was given `lr_head`; one began where its default was 0.5."""
    (tmp_path / "inputs.json").write_text(json.dumps({"hyper": {"lr_head": 0.5}}))
    usual, other = run(), replace(run(seed=1), folder=tmp_path)
    first = f"lr_head={hyper_values(FedAvg())['lr_head']}"
    assert names(usual, other) == [f"fedavg, {first}", "fedavg, lr_head=0.5"]
    told = f"NOT ALL WITH THE SAME SETTINGS: of a, seed 0 had {first} and seed 1 had lr_head=0.5"
    assert unlike_settings({"a": [usual, other]}) == [told] and unlike_settings({"a": [usual, run(seed=1)]}) == []


def test_a_setting_that_one_version_lacks_is_called_unset(tmp_path):
    """docs/reference/runs.md, `inputs.json`: one run began where the method had `lr`, which it has no more."""
    (tmp_path / "inputs.json").write_text(json.dumps({"hyper": {"lr": 0.5}}))
    older, usual = replace(run(), folder=tmp_path), run(seed=1)
    told = "NOT ALL WITH THE SAME SETTINGS: of a, seed 0 had lr=0.5 and seed 1 had lr=unset"
    assert unlike_settings({"a": [older, usual]}) == [told]


def test_folders_are_left_out_where_the_last_names_differ():
    told = [run(backbone=f"run:/data/{name}") for name in ("a/mae", "a/moco")]
    assert names(*told) == ["fedavg, backbone=run:mae", "fedavg, backbone=run:moco"]
    told = [run(backbone=f"run:/data/{name}") for name in ("a/mae", "b/mae")]
    assert names(*told) == ["fedavg, backbone=run:/data/a/mae", "fedavg, backbone=run:/data/b/mae"]


def test_presets_and_rounds_are_named_by_the_table_alone():
    """They bring other settings along, and the table writes them behind the name."""
    assert names(run(), run(preset="tiny", hyper={"lr_head": 0.01}), run(rounds=9)) == ["fedavg"] * 3


def test_of_many_settings_as_few_are_named_as_tell_the_runs_apart():
    many = {"lr_head": 0.5, "batch": 3, "weight_decay": 0.5, "b_blocks": 1}
    one, two, three = run(), run(hyper=many, epochs=3), run(hyper={**many, "batch": 5}, epochs=3)
    told = names(one, two, three)
    assert len(set(told)) == 3 and all(name.count("=") == 3 and name.endswith(", and 2 more") for name in told)
    assert "batch=3" in told[1] and "batch=5" in told[2]
