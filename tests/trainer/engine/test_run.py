"""`edgefl-train run` from end to end on drawn pictures: files, digests, bytes and seeds of docs/design.md 5."""

import hashlib
import json
import struct
import tomllib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.trainer.conftest import MAE, TINY, edgefl_train, make_ward

SUMMARY_KEYS = {
    "method", "task", "seed", "rounds", "preset", "partition_sha256", "sites", "mean_balanced_accuracy",
    "std_balanced_accuracy", "worst_balanced_accuracy", "p15_balanced_accuracy", "bytes_up_per_round",
    "bytes_down_per_round", "seconds", "state_sha256",
}  # fmt: skip
SITE_KEYS = {
    "n_train", "n_test", "balanced_accuracy", "macro_precision", "macro_f1", "specificity", "auroc", "accuracy", "ece",
    "brier", "aurc",
}  # fmt: skip
METHODS = ("local", "fedavg", "fedevprompt")
TYPES = {"float16": b"F16", "float32": b"F32", "float64": b"F64"}


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def joined(*parts: bytes) -> bytes:
    return struct.pack("<Q", len(parts)) + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def recomputed_digest(folder: Path) -> str:
    """`state_sha256` from the checkpoint files, read by the safetensors package: docs/design.md 5 in ten lines."""

    def of(file: str) -> str:
        arrays = load_file(folder / "checkpoints" / file)
        parts: list[bytes] = []
        for name in sorted(arrays):
            shape = ",".join(map(str, arrays[name].shape))
            parts += [name.encode(), TYPES[arrays[name].dtype.name], shape.encode(), arrays[name].tobytes()]
        return hashlib.sha256(joined(*parts)).hexdigest()

    latest = json.loads((folder / "checkpoints" / "latest.json").read_text())
    sites = [f"{name}:{of(latest['sites'][name])}".encode() for name in sorted(latest["sites"])]
    return hashlib.sha256(joined(of(latest["server"]).encode(), *sites)).hexdigest()


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_the_files_of_the_contract(method, finished):
    folder = finished[method]
    found = summary(folder)
    assert found.keys() >= SUMMARY_KEYS
    assert (found["method"], found["task"], found["seed"], found["preset"]) == (method, "all", 0, "tiny")
    assert set(found["sites"]) == {"east", "west"}
    for name, site in found["sites"].items():
        assert site.keys() >= SITE_KEYS
        judged = load_file(folder / "tune" / f"{name}.safetensors")["targets"]
        assert site["classes_tuned"] == len(set(judged.tolist()))  # chance of its curve
    calibration = json.loads((folder / "calibration.json").read_text())
    assert {"temperature", "refer_above"} <= calibration.keys()
    environment = json.loads((folder / "environment.json").read_text())
    assert {"versions", "commit", "seed"} <= environment.keys()
    assert torch.__version__.startswith(environment["versions"]["torch"])
    assert (folder / "checkpoints").is_dir()
    assert (folder / "backbone.safetensors").is_file()
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("method", METHODS)
def test_rows_add_up_and_figures_are_in_range(method, finished):
    """20 images a site: 25 % test, of the other 15 a share of 15 % tunes, so 13 train."""
    found = summary(finished[method])
    for site in found["sites"].values():
        assert (site["n_train"], site["n_test"]) == (13, 5)
        assert all(0 <= site[name] <= 1 for name in SITE_KEYS - {"n_train", "n_test", "brier"})
        assert 0 <= site["brier"] <= 2
    figures = [site["balanced_accuracy"] for site in found["sites"].values()]
    np.testing.assert_allclose(found["mean_balanced_accuracy"], np.mean(figures))
    np.testing.assert_allclose(found["std_balanced_accuracy"], np.std(figures, ddof=1))
    assert found["worst_balanced_accuracy"] == min(figures)


@pytest.mark.parametrize(("method", "phases"), [("local", 2), ("fedavg", 3), ("fedevprompt", 2)])
def test_metrics_hold_a_line_for_each_phase_and_site(method, phases, finished):
    """Two rounds; FedAvg has a warm phase before them."""
    lines = metrics(finished[method])
    assert [(line["phase_index"], line["site"]) for line in lines] == [
        (index, site) for index in range(phases) for site in ("east", "west")
    ]
    rounds = [(line["phase"], line["round"]) for line in lines if line["site"] == "east"]
    assert rounds == [("warm", 0)] * (phases - 2) + [("train", 1), ("train", 2)]
    assert all(line["loss"] > 0 for line in lines if line["phase"] == "train")


@pytest.mark.parametrize("method", ["fedevprompt", "fedmae"])
def test_each_epoch_leaves_its_figures(method, tmp_path, ward, mae):
    """docs/methods.md 1.6, training: loss, share of the distillation and zero evidence, per site and epoch."""
    backbone = ("tiny", *MAE) if method == "fedmae" else (f"run:{mae}",)
    arguments = ("--data", ward, "--out", tmp_path / "run", *TINY, "--rounds", 2, "--epochs", 3)
    assert edgefl_train("run", method, *arguments, "--backbone", *backbone).code == 0
    lines = [line for line in metrics(tmp_path / "run") if line["phase"] == "train"]
    assert len(lines) == 4
    for line in lines:
        names = {"loss"} if method == "fedmae" else {"loss", "zero_evidence_share", "vacuity"}
        names |= {"kd_share"} if method == "fedevprompt" and line["round"] == 2 else set()  # no maps in round 1
        assert [set(epoch) for epoch in line["epochs"]] == [names] * 3
        assert {name: line[name] for name in names} == line["epochs"][-1]  # the last one also stands on top
        assert len({epoch["loss"] for epoch in line["epochs"]}) == 3
        assert line["seconds"] > 0
    if method == "fedevprompt":
        assert all(0 < epoch["vacuity"] < 1 for line in lines for epoch in line["epochs"])
        assert all(epoch["kd_share"] > 0 for line in lines if line["round"] == 2 for epoch in line["epochs"])


def test_fedmae_leaves_a_backbone_and_probes_both_readouts(mae):
    found = summary(mae)
    assert found.keys() >= SUMMARY_KEYS
    assert set(found["probe"]) == {"cls", "mean"}
    for readout in found["probe"].values():
        assert set(readout["sites"]) == {"east", "west"}
        assert 0 <= readout["mean"] <= 1
    assert found["mean_balanced_accuracy"] is None  # an autoencoder names no class
    assert not (mae / "models").exists()
    assert load_file(mae / "backbone.safetensors").keys() >= {"cls_token", "patch_embed.proj.weight", "norm.weight"}


@pytest.mark.parametrize("method", ["fedmae", *METHODS])
def test_state_digest_can_be_recomputed_from_the_checkpoints(method, finished, mae):
    folder = mae if method == "fedmae" else finished[method]
    assert recomputed_digest(folder) == summary(folder)["state_sha256"]


def test_fedmae_ends_with_one_class_token(mae):
    """arXiv 2208.11278: class tokens stay apart until the end, then all sites hold their mean."""
    latest = json.loads((mae / "checkpoints" / "latest.json").read_text())
    tokens = [load_file(mae / "checkpoints" / file)["backbone.cls_token"] for file in latest["sites"].values()]
    np.testing.assert_array_equal(tokens[0], tokens[1])
    np.testing.assert_array_equal(load_file(mae / "backbone.safetensors")["cls_token"], tokens[0])


def test_a_frozen_backbone_is_the_one_that_was_learned(mae, finished):
    learned = load_file(mae / "backbone.safetensors")
    for folder in finished.values():
        used = load_file(folder / "backbone.safetensors")
        assert used.keys() == learned.keys()
        for name, value in learned.items():
            np.testing.assert_array_equal(used[name], value)


@pytest.mark.parametrize("method", ["fedavg", "fedevprompt"])
def test_bytes_per_round_are_the_payloads_sizes(method, tmp_path, ward, mae, monkeypatch):
    """Mean over rounds of the sum over sites of the bytes that crossed, counted at the site's door."""
    from edgefl_trainer.engine import local_engine

    up, down = defaultdict(int), defaultdict(int)
    plain = local_engine.InProcessSite.local_round

    def counted(self, state, broadcast, report):
        result = plain(self, state, broadcast, report)
        key = (broadcast.scalars["phase"], broadcast.scalars["round"])
        up[key] += len(result.reply.to_bytes())
        down[key] += len(broadcast.to_bytes())
        return result

    monkeypatch.setattr(local_engine.InProcessSite, "local_round", counted)
    arguments = ("run", method, "--data", ward, "--out", tmp_path / "run", "--backbone", f"run:{mae}", *TINY)
    found = edgefl_train(*arguments, "--json").json()
    for name, counts in (("bytes_up_per_round", up), ("bytes_down_per_round", down)):
        rounds = [count for (phase, _), count in counts.items() if phase == "train"]
        assert len(rounds) == 2
        assert found[name] == pytest.approx(np.mean(rounds), abs=0.05)


def test_fedevprompt_sends_little_more_than_its_maps(finished):
    """At most M = 5 maps of 9 float16, two classes, two sites: 360 bytes; names and sizes add under 300 a site."""
    assert 360 <= summary(finished["fedevprompt"])["bytes_up_per_round"] <= 360 + 2 * 300


def test_a_method_that_sends_nothing_counts_no_byte(finished):
    """What its payloads hold, phase, round and digest, is the engine's own."""
    found = summary(finished["local"])
    assert found["travels"] == []
    ways = ("bytes_up_per_round", "bytes_down_per_round", "bytes_up_total", "bytes_down_total")
    assert [found[way] for way in ways] == [0, 0, 0, 0]


def test_a_run_from_its_own_config_file_is_the_same_run(tmp_path, finished):
    """docs/design.md 5: config.toml holds the resolved settings."""
    folder = finished["fedevprompt"]
    again = edgefl_train(
        "run", "fedevprompt", "--config", folder / "config.toml", "--out", tmp_path / "run", "--json"
    ).json()
    assert again["state_sha256"] == summary(folder)["state_sha256"]
    assert again["partition_sha256"] == summary(folder)["partition_sha256"]
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text()) == tomllib.loads(
        (folder / "config.toml").read_text()
    )


def test_another_seed_is_another_run(tmp_path, ward, mae, finished):
    other = edgefl_train(
        "run", "fedavg", "--data", ward, "--out", tmp_path / "run", "--backbone", f"run:{mae}", *TINY, "--seed", "1",
        "--json",
    ).json()  # fmt: skip
    assert other["seed"] == 1
    assert other["state_sha256"] != summary(finished["fedavg"])["state_sha256"]


def test_fedmae_repeats_and_learns_on_from_a_backbone(tmp_path, ward, mae):
    """The same command gives the same digest; from a backbone, the class token goes on too (docs/methods.md 3)."""
    same = edgefl_train(
        "run", "fedmae", "--data", ward, "--out", tmp_path / "a", "--backbone", "tiny", *TINY, *MAE, "--json"
    ).json()
    assert same["state_sha256"] == summary(mae)["state_sha256"]
    rate = ("--set", "lr=1e-12", "--rounds", "1")  # next to no step: what is there at the end was there at the start
    outcome = edgefl_train(
        "run", "fedmae", "--data", ward, "--out", tmp_path / "b", "--backbone", f"run:{mae}", *TINY, *MAE, *rate
    )
    assert outcome.code == 0, outcome.err
    before, after = load_file(mae / "backbone.safetensors"), load_file(tmp_path / "b" / "backbone.safetensors")
    for name in ("cls_token", "blocks.0.attn.qkv.weight"):
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)


@pytest.mark.parametrize("method", ["local", "fedevprompt", "fedmae"])
def test_a_site_that_took_part_in_no_round_does_not_break_the_results(method, tmp_path, ward, mae):
    """Half of two sites for one round: the other is judged with its initial model, and has no class token to give."""
    backbone = ("--backbone", "tiny", *MAE) if method == "fedmae" else ("--backbone", f"run:{mae}")
    arguments = ("--data", ward, *backbone, *TINY, "--rounds", "1", "--participation", "0.5", "--json")
    found = edgefl_train("run", method, "--out", tmp_path / "run", *arguments).json()
    trained = [line["site"] for line in metrics(tmp_path / "run") if line["phase"] == "train"]
    assert len(trained) == 1
    assert set(found["sites"]) == {"east", "west"}
    parts = {name: site["took_part"] for name, site in found["sites"].items()}
    assert parts == {name: {"rounds": int(name in trained), "of": 1} for name in ("east", "west")}
    if method != "fedmae":
        assert all(site["balanced_accuracy"] is not None for site in found["sites"].values())


def test_a_share_of_the_sites_is_drawn_by_the_seed(tmp_path, ward, mae):
    """Same seed, same sites and digest; over seeds both sites have their turn."""

    def trained(place: str, seed: int) -> tuple[str, str]:
        arguments = ("--data", ward, "--backbone", f"run:{mae}", *TINY, "--rounds", "1", "--participation", "0.5")
        found = edgefl_train("run", "local", "--out", tmp_path / place, *arguments, "--seed", seed, "--json").json()
        (line,) = metrics(tmp_path / place)
        return line["site"], found["state_sha256"]

    first = [trained(f"a{seed}", seed) for seed in range(5)]
    assert first[3:] == [trained(f"b{seed}", seed) for seed in (3, 4)]
    assert {site for site, _ in first} == {"east", "west"}  # one in sixteen by chance alone would be one-sided
    assert len({digest for _, digest in first}) == 5


def test_a_site_of_one_class_and_a_class_missing_from_test_rows(tmp_path, cached, mae):
    """docs/methods.md, prior and evaluation: finite models; undefined figures are null, never NaN."""
    counts = {"east": {"nevus": 10, "other": 10}, "west": {"nevus": 12}}
    ward = f"folder:{make_ward(tmp_path / 'ward', counts)}"
    for method in METHODS:
        outcome = edgefl_train(
            "run", method, "--data", ward, "--out", tmp_path / method, "--backbone", f"run:{mae}", *TINY, "--json"
        )
        sites = json.loads(outcome.out, parse_constant=lambda text: pytest.fail(f"{text} in the summary"))["sites"]
        west = sites["west"]
        assert west["auroc"] is None  # one class only: no area
        assert west["specificity"] is None
        assert west["balanced_accuracy"] == 1.0  # the one class is the only one that can be predicted
        assert {name: site["classes_tested"] for name, site in sites.items()} == {"east": 2, "west": 1}
        assert "mean of the 1 site with more than one class" in outcome.err
        lines = [line for line in outcome.err.splitlines() if "has one class" in line]
        assert lines == [
            "warning: site west has one class in its training rows, nevus: "
            "it can predict no other, so its figures mean nothing"
        ]
        for file in (tmp_path / method / "checkpoints").rglob("west.state.safetensors"):
            assert all(np.isfinite(value).all() for value in load_file(file).values())
