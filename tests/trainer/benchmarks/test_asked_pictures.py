"""benchmarks/causes/asked_pictures.py on drawn pictures, whose colour the picture alone tells."""

import json

import numpy as np
import pytest
from benchmarks.causes import asked_pictures
from click.testing import CliRunner
from safetensors.numpy import load_file
from tests.trainer.conftest import edgefl_train, make_asked

NETWORK = ("--backbone", "tiny", "--image-px", "36")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, cached):
    return make_asked(tmp_path_factory.mktemp("drawn"), {"HEAD": 72, "CHEST": 72, "ABD": 72})


def lines(*words):
    done = CliRunner().invoke(asked_pictures.main, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_sites_that_look_alike_are_not_told_apart(drawn):
    """Every site draws the same three colours: one of three at chance."""
    found = lines("held", "--data", f"vqa-rad:{drawn}", *NETWORK)
    assert [line["from"] for line in found] == ["12 x 12 pixels", "tiny"]
    assert all(0.1 < line["balanced_accuracy"] < 0.6 for line in found)


def test_words_alone_tell_little_and_the_picture_tells_a_yes(drawn):
    """Four wordings, each asked often: at most half of the yes/no questions, and a third of the colours."""
    found = lines("worded", "--data", f"vqa-rad:{drawn}", *NETWORK)
    sites, shares = found[:3], found[3:]
    for site in sites:
        assert site["questions"] == 2 * site["pictures"] and site["worded_once"] == 0
        assert site["told_by_words"] < 0.7 * site["questions"]
        assert site["judged_with_an_answer_of_the_site"] == site["judged"]
    by = {(line["from"], line["folds_of"]): line["accuracy"] for line in shares}
    assert len(by) == 6
    for unit in ("pictures", "questions"):
        assert by["words", unit] < 0.65 < by["words, site, words x picture", unit]


@pytest.mark.slow
def test_a_run_is_asked_with_both_pictures(drawn, tmp_path):
    run = tmp_path / "run"
    small = ("--preset", "tiny", "--backbone", "vit:32x2/12", "--image-px", "36", "--rounds", 1, "--device", "cpu")
    done = edgefl_train("run", "local", "--data", f"vqa-rad:{drawn}", *small, "--set", "picture=hidden", "--out", run)
    assert done.code == 0, done.err
    found = lines("asked", run)
    assert {line["rows"] for line in found} <= {"train", "tune", "test"} and len({line["site"] for line in found}) == 3
    for line in found:  # the picture is hidden: another one changes nothing
        assert line["own_picture"] == line["other_picture"] and line["share_lost_interval"] == [0.0, 0.0]
        assert 0 <= line["own_picture"] <= line["questions"]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory, cached):
    """A run of two rounds: two sites have enough tune questions to keep either, the third keeps its last.

    Steps are so large that a second round may be worse than the first.
    """
    run = tmp_path_factory.mktemp("exchanged") / "run"
    drawn = make_asked(run.parent / "drawn", {"HEAD": 240, "CHEST": 240, "ABD": 24})
    small = ("--preset", "tiny", "--backbone", "vit:32x2/12", "--image-px", "36", "--device", "cpu")
    given = ("--data", f"vqa-rad:{drawn}", "--rounds", 2, "--select", "tune", "--set", "lr=0.05")
    done = edgefl_train("run", "pfl-vqa", *given, *small, "--out", run)
    assert done.code == 0, done.err
    return run


@pytest.mark.slow
def test_a_run_is_asked_without_its_prompts(exchanged):
    """Kept models are of the round that the summary names, those of the last round of the last states."""
    told = json.loads((exchanged / "summary.json").read_text())["sites"]
    latest = json.loads((exchanged / "checkpoints/latest.json").read_text())
    assert len(latest["best"]) == 2
    of_kept = latest["sites"] | {site: best["state"] for site, best in latest["best"].items()}
    for words, states in (((), of_kept), (("--last-round",), latest["sites"])):
        sites = [line for line in lines("prompted", *words, exchanged) if "site" in line]
        assert len(sites) == 3
        for line in sites:
            assert line["round"] == (2 if words else told[line["site"]]["selected_round"])
            assert line["met_another_prompt"] is (line["round"] == 2)  # in the first round nothing is broadcast
            state = load_file(exchanged / "checkpoints" / states[line["site"]])
            gates = [float(state[name]) for name in sorted(state) if name.startswith("fusion.") and "gate" in name]
            assert line["gates"] == pytest.approx(gates, abs=1e-4)
            assert 0 <= line["changed_without_prompts"] <= line["questions"]
            assert abs(line["right"] - line["right_without_prompts"]) <= line["changed_without_prompts"]


@pytest.mark.slow
def test_cosines_and_eta_are_of_prompts_of_one_round(exchanged):
    """Whichever rounds the sites kept: eta_i = acc_i cs(p_i, p_t) / sum of acc_j cs(p_j, p_t) of the last replies."""
    latest = json.loads((exchanged / "checkpoints/latest.json").read_text())["sites"]
    states = {site: load_file(exchanged / "checkpoints" / file) for site, file in latest.items()}
    prompts = {site: np.concatenate([one["prompts.image"], one["prompts.text"]]) for site, one in states.items()}
    learned = map(json.loads, (exchanged / "metrics.jsonl").read_text().splitlines())
    accuracy = {line["site"]: line["tune_accuracy"] for line in learned if line.get("round") == 2 and "site" in line}
    found = lines("prompted", exchanged)

    def cosine(one, other):
        one, other = (prompts[name].astype(float).ravel() for name in (one, other))
        return one @ other / (one @ one * (other @ other)) ** 0.5

    pairs = [line for line in found if "prompts_of" in line]
    assert len(pairs) == 3 and all(
        line["cosine"] == pytest.approx(cosine(*line["prompts_of"]), abs=1e-5) for line in pairs
    )
    shares = [line for line in found if "eta" in line]
    assert {line["shared_prompt_of"] for line in shares} == set(latest)
    for line in shares:
        spoken = {name: accuracy[name] * cosine(name, line["shared_prompt_of"]) for name in line["eta"]}
        assert len(spoken) == 2 and line["shared_prompt_of"] not in spoken
        for name, value in spoken.items():
            assert line["eta"][name] == pytest.approx(value / sum(spoken.values()), abs=1e-3)
