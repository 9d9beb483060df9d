"""`edgefl-train finetune` and `--labels`: docs/guides/learn-without-labels.md, fine-tuning; docs/methods.md 3.4."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.conftest import TINY, edgefl_train, make_ward, records, write_index
from tests.trainer.engine.conftest import files_of
from tests.trainer.engine.test_run import metrics, summary

from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.engine.settings import RunSettings, read_settings, resolve
from edgefl_trainer.errors import SettingError
from edgefl_trainer.models.network_kind import network_kind

TUNING = ("--device", "cpu", "--json")


def command(mae, mode: str, folder, *more: object) -> tuple[object, ...]:
    return ("finetune", mae, "--mode", mode, "--labels", 0.4, "--out", folder, *TUNING, *more)


@pytest.fixture(scope="session")
def tuned(tmp_path_factory, mae):
    """Finished fine-tuning runs of that network, by mode."""
    root = tmp_path_factory.mktemp("tuned")
    for mode in ("local", "federated"):
        outcome = edgefl_train(*command(mae, mode, root / mode))
        assert outcome.code == 0, outcome.err
    return {mode: root / mode for mode in ("local", "federated")}


def test_the_command_takes_over_what_the_run_had(tuned, mae, ward):
    for mode, folder in tuned.items():
        before, after = read_settings(mae / "config.toml"), read_settings(folder / "config.toml")
        assert after.method == "finetune" and after.backbone == f"run:{mae}" and after.labels == 0.4
        assert after.hyper["mode"] == mode and after.select == {"local": "tune", "federated": "pooled"}[mode]
        for name in ("data", "task", "classes", "seed", "preset", "image_px"):
            assert getattr(after, name) == getattr(before, name), name


@pytest.fixture
def asked(monkeypatch) -> list[RunSettings]:
    """Settings of the runs that a command begins; none is run."""
    found: list[RunSettings] = []
    monkeypatch.setattr("edgefl_trainer.engine.run.run", lambda settings, out, **_: found.append(settings) or {})
    return found


@pytest.fixture
def before(tmp_path) -> Path:
    """A finished run with settings that are nobody's defaults."""
    given = {
        "data": (f"folder:{tmp_path}",), "partition": "dealt.json", "task": "nevus", "classes": ("nevus", "melanoma"),
        "seed": 3, "preset": "paper", "image_px": 60, "backbone": "tiny",
    }  # fmt: skip
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "config.toml").write_text(resolve("fedmae", given, None, []).to_toml())
    (folder / "summary.json").write_text("{}")
    return folder


def test_everything_about_the_data_is_the_runs(before, asked, tmp_path):
    """docs/guides/learn-without-labels.md: `finetune` takes data, sites, task, classes, seed and preset from the run
    it goes on with."""
    assert edgefl_train(*command(before, "local", tmp_path / "run")).code == 0
    [settings] = asked
    assert (settings.data, settings.partition) == ((f"folder:{tmp_path}",), "dealt.json")
    assert (settings.task, settings.classes) == ("nevus", ("nevus", "melanoma"))
    assert (settings.seed, settings.preset, settings.image_px) == (3, "paper", 60)
    assert (settings.method, settings.backbone, settings.labels) == ("finetune", f"run:{before}", 0.4)
    assert (settings.rounds, settings.epochs) == (40, 5)  # of fine-tuning, not of the run before


def test_what_is_given_counts_before_what_the_run_had(before, asked, tmp_path):
    """Sites dealt from the run's data are not asked of other data."""
    more = ("--task", "all", "--classes", "a, b", "--seed", 4, "--preset", "tiny", "--data", f"folder:{before}")
    assert edgefl_train(*command(before, "federated", tmp_path / "run", *more)).code == 0
    [settings] = asked
    assert (settings.data, settings.partition) == ((f"folder:{before}",), "")
    assert (settings.task, settings.classes) == ("all", ("a", "b"))
    assert (settings.seed, settings.preset, settings.image_px) == (4, "tiny", 60)
    assert settings.hyper["mode"] == "federated"


def test_run_with_the_same_options_is_the_same_run(tuned, mae, ward, tmp_path):
    outcome = edgefl_train(
        "run", "finetune", "--data", ward, "--out", tmp_path / "run", "--backbone", f"run:{mae}", *TINY,
        "--labels", 0.4, "--set", "mode=local", "--json",
    )  # fmt: skip
    found = outcome.json()
    assert found["state_sha256"] == summary(tuned["local"])["state_sha256"]
    assert found["settings_sha256"] == summary(tuned["local"])["settings_sha256"]


def test_the_summary_counts_the_labels(tuned, ward):
    """ceil(0.4 · n) of each class at each site (every lesion has one image here)."""
    whole = load_federation([ward], image_px=36)
    for folder in tuned.values():
        found = summary(folder)
        assert found["labels"] == 0.4
        assert 0 <= found["wait_share"] <= 1 and found["images_per_second"] > 0
        for name, rows in whole.sites.items():
            due = sum(int(np.ceil(0.4 * n - 1e-9)) for n in whole.counts(rows.train))
            assert found["sites"][name]["n_labelled"] == found["sites"][name]["n_train"] == due < len(rows.train)


def test_figures_are_those_of_the_labelled_methods(tuned, finished):
    """The six figures of the paper's Tables III and IV, and all of ours: of each site and pooled, by the same names."""
    labelled = summary(finished["fedavg"])
    for folder in tuned.values():
        found = summary(folder)
        for name, site in found["sites"].items():
            assert site.keys() == labelled["sites"][name].keys()
            for figure in ("macro_recall", "macro_precision", "macro_f1", "specificity", "auroc", "accuracy"):
                assert 0 <= site[figure] <= 1 and 0 <= found["pooled"][figure] <= 1


def test_only_the_federated_mode_sends_the_network(tuned):
    network = sum(value.size * 4 for value in open_run(tuned["local"]).predictor("east").network.values())
    assert summary(tuned["local"])["bytes_up_per_round"] == 0
    assert summary(tuned["federated"])["bytes_up_per_round"] > 2 * network
    assert summary(tuned["federated"])["travels"] == ["weights"] and summary(tuned["local"])["travels"] == []


def test_sites_part_in_local_mode_and_agree_in_federated(tuned):
    for mode, folder in tuned.items():
        run = open_run(folder)
        east, west = (run.predictor(name).network for name in ("east", "west"))
        selected = {one["selected_round"] for one in run.summary["sites"].values()}
        same = all(np.array_equal(east[name], west[name]) for name in east)
        assert same is (mode == "federated" and len(selected) == 1)
        frozen = run.backbone.network.state_dict()
        assert any(not np.array_equal(value, frozen[name].numpy()) for name, value in east.items())


def test_a_finished_run_is_judged_compared_and_scores_a_picture(tuned, ward, tmp_path):
    folder = tuned["local"]
    judged = edgefl_train("evaluate", folder, "--data", ward, "--json").json()
    assert judged["labels"] == 0.4 and judged["sites"].keys() == {"east", "west"}
    for name in judged["sites"]:
        assert judged["sites"][name]["brier"] == pytest.approx(summary(folder)["sites"][name]["brier"], abs=1e-6)
    picture = next(Path(ward.removeprefix("folder:")).rglob("*.png"))
    [line] = edgefl_train("predict", folder, picture, "--site", "east", "--json").out.splitlines()
    assert sum(json.loads(line)["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    table = edgefl_train("table", *tuned.values(), "--format", "json").json()
    assert len(table["rows"]) == 2


@pytest.mark.parametrize("most", [0, 10])
def test_smaller_shares_learn_from_a_part_of_the_rows_of_larger(ward, most):
    """10 % inside 20 % inside 40 % inside 80 % inside what `--images-per-site` leaves, as `run` deals them."""
    from edgefl_trainer.engine.sites import load_data

    rows = []
    for share in (0.1, 0.2, 0.4, 0.8, 1.0):
        settings = resolve("finetune", {"data": (ward,), "labels": share, "images_per_site": most}, None, [])
        rows.append({name: set(site.train.tolist()) for name, site in load_data(settings, 36).sites.items()})
    for smaller, larger in pairwise(rows):
        assert all(smaller[name] <= larger[name] for name in larger)
    assert rows[0] != rows[-1]
    assert not most or all(len(own) <= most for own in rows[-1].values())


@pytest.mark.parametrize("share", [0.2, 0.4, 0.8])
def test_a_share_counts_what_images_per_site_leaves(ward, share):
    """docs/methods.md 3.4: ceil(share · n) of each class among the training images after `--images-per-site`."""
    from edgefl_trainer.engine.sites import load_data

    settings = resolve("finetune", {"data": (ward,), "labels": share, "images_per_site": 10}, None, [])
    limited, kept = load_federation([ward], image_px=36, limit=10), load_data(settings, 36)
    for name, rows in limited.sites.items():
        assert 8 <= len(rows.train) <= 10
        due = [int(np.ceil(share * n - 1e-9)) for n in limited.counts(rows.train)]
        assert list(kept.counts(kept.sites[name].train)) == due


@pytest.mark.parametrize("mode", ["local", "federated"])
@pytest.mark.slow  # that a killed run goes on is test_resume's; here, that a fine-tuning does
@pytest.mark.parametrize(
    "moment", ["phase-0000/west.metrics.json", "checkpoints/latest.json", "phase-0001/east.state.safetensors"]
)
def test_kill_9_and_resume_is_the_undisturbed_run(mode, moment, tmp_path, mae, tuned, kill_after):
    arguments = command(mae, mode, tmp_path / "run")
    kill_after(moment, *arguments)
    found = edgefl_train(*arguments, "--resume").json()
    assert found["state_sha256"] == summary(tuned[mode])["state_sha256"]
    for name in ("east", "west"):
        file = f"models/{name}.safetensors"
        assert (tmp_path / "run" / file).read_bytes() == (tuned[mode] / file).read_bytes()


def test_another_share_does_not_resume(mae, tuned):
    before = files_of(tuned["local"])
    outcome = edgefl_train(*command(mae, "local", tuned["local"], "--labels", 0.8, "--resume"))
    assert outcome.code == 2 and "has labels = 0.4, but this command has 0.8" in outcome.sentence()
    assert files_of(tuned["local"]) == before


def test_local_rounds_are_judged_on_tune_rows(tuned):
    judged = [line for line in metrics(tuned["local"]) if "tune_balanced_accuracy" in line]
    assert {line["round"] for line in judged} == {1, 2}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--labels", 0), "labels is 0.0; allowed: above 0, at most 1"),
        (("--labels", 1.5), "labels is 1.5; allowed: above 0, at most 1"),
        (("--labels", "nan"), "labels is nan; allowed: above 0, at most 1"),
        (("--set", "layer_decay=2"), "layer_decay is 2.0; allowed"),
        (("--set", "readout=pooled"), "leave --set readout out"),
        (("--set", "prompts=bt"), "there is no key 'prompts'"),
        (("--rounds", 0), "rounds is 0"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(more, words, mae, tmp_path):
    outcome = edgefl_train(*command(mae, "local", tmp_path / "run", *more))
    assert outcome.code == 2 and words in outcome.sentence()
    assert not (tmp_path / "run").exists()


def test_the_mode_is_said_once(mae, tmp_path):
    outcome = edgefl_train(*command(mae, "local", tmp_path / "run", "--set", "mode=federated"))
    assert outcome.code == 2 and "give --mode alone" in outcome.err


def test_a_run_that_is_none_or_unfinished_or_with_labels_is_refused(mae, finished, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_bytes((mae / "config.toml").read_bytes())
    for folder, words in (
        (tmp_path / "nowhere", "is not a run directory"),
        (tmp_path / "begun", "is not finished"),
        (finished["local"], "a run of local, which does not train a whole network"),
    ):
        outcome = edgefl_train(*command(folder, "local", tmp_path / "run"))
        assert outcome.code == 2 and words in outcome.sentence()


def test_a_site_without_a_labelled_image_is_named(mae, tmp_path, cached):
    rows = records()
    for row in rows[6:]:
        row["split"] = "unlabelled"
    data = f"manifest:{write_index(tmp_path / 'data', rows)}"
    outcome = edgefl_train(*command(mae, "local", tmp_path / "run", "--data", data))
    assert outcome.code in (1, 2) and "west" in outcome.sentence().lower()


def test_a_method_without_labels_takes_no_share():
    with pytest.raises(SettingError, match=r"uses no labels, so --labels 0\.1 has no effect"):
        resolve("fedmae", {"data": ("folder:x",), "labels": 0.1}, None, [])


def test_images_without_a_label_are_left_where_unlabelled_ones_are_asked_for(tmp_path, cached):
    from edgefl_trainer.engine.sites import load_data

    data = f"folder:{make_ward(tmp_path / 'ward', {'east': {'nevus': 20, 'other': 20}})}"
    some = {"data": (data,), "labels": 0.2}
    without, kept = (
        load_data(resolve("finetune", {**some, "unlabelled": use}, None, []), 36).sites["east"]
        for use in ("none", "site")
    )
    assert without.train.tolist() == kept.train.tolist() and not len(without.unlabelled)
    whole = load_federation([data], image_px=36).sites["east"]
    assert sorted([*kept.train, *kept.unlabelled]) == whole.train.tolist()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tiny", "vit"), ("vit:192x12/12", "vit"), ("derm-vit-tiny-84", "vit"), ("cnn:resnet18", "cnn"),
        ("timm:resnet18", "cnn"), ("timm:resnet18.a1_in1k", "cnn"), ("timm:mobilenetv3_small_050", "cnn"),
        ("timm:vit_small_patch16_224.augreg_in21k", "vit"), ("timm:deit_tiny_patch16_224", "vit"),
        ("timm:nothing", "vit"), ("run:/nowhere", "vit"), ("file:/nowhere", "vit"),
    ],
)  # fmt: skip
def test_a_name_tells_the_kind_of_network(name, kind):
    """Nothing is built or fetched; what stands for nothing is refused later, by whoever loads it."""
    assert network_kind(name) == kind


def test_the_preset_follows_the_kind_of_network_in_a_file(mae, tmp_path):
    from edgefl_trainer.models.architectures import CNNArchitecture
    from edgefl_trainer.models.backbones import backbone_bytes, load_backbone, weights_of

    cnn = load_backbone("cnn:mobilenetv3_small_050", image_px=36, seed=0)
    kind = CNNArchitecture(cnn="mobilenetv3_small_050", image_px=36)
    (tmp_path / "cnn.safetensors").write_bytes(backbone_bytes(kind, weights_of(cnn.network), self_supervised=True))
    for backbone, optimizer in ((f"file:{tmp_path}/cnn.safetensors", "adam"), (f"run:{mae}", "adamw")):
        settings = resolve("finetune", {"data": ("folder:x",), "backbone": backbone}, None, ["mode=local"])
        assert settings.hyper["optimizer"] == optimizer
