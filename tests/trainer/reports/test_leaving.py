"""What a report says of what left the sites: kinds, bytes and privacy noise. Source: docs/methods.md 2.2 and 6."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_protocol.rules.feature_rows import made_in_round
from edgefl_trainer.reports.blocks import FactList, ReportTable, Words
from edgefl_trainer.reports.leaving import travels_section
from edgefl_trainer.reports.run_facts import RunFacts, read_run


def leaving(facts: RunFacts) -> str:
    """The words of the section that tells what leaves a site, one block, term or cell a line."""
    lines: list[str] = []
    for block in travels_section(facts).blocks:
        if isinstance(block, Words):
            lines.append(block.text)
        elif isinstance(block, FactList):
            lines += [text for term, cell in block.rows for text in (term, cell.text)]
        else:
            assert isinstance(block, ReportTable)
            lines += [cell.text for row in block.rows for cell in row]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def noised(cached, tmp_path_factory) -> Path:
    """A finished run of FedCLF whose features carry noise, of the preset tiny: K is 128."""
    folder = tmp_path_factory.mktemp("noised") / "run"
    given = ("run", "fedclf", "--data", "lesions:sites=2,images=20,px=32", "--preset", "tiny", "--device", "cpu")
    budget = ("--rounds", 1, "--epochs", 1, "--set", "dp_noise=1", "--privacy-budget", 40)
    made = edgefl_train(*given, *budget, "--out", folder)
    assert made.code == 0, made.err
    return folder


def as_set(facts: RunFacts, folder: Path, **changes: Any) -> RunFacts:
    """The same run with other settings, in a folder that keeps none of those it began with."""
    return replace(facts, run=replace(facts.run, folder=folder, settings=replace(facts.run.settings, **changes)))


def test_what_leaves_of_a_picture_is_told_as_the_run_sent_it(finished, tmp_path):
    """It said "each or of every class their mean": docs/decisions/0071, and docs/results/what_leaves.md the figures."""
    facts = read_run(finished["fedevprompt"])  # of the preset tiny, which sends means
    mean = "of each class the mean of the maps of at most 5 training pictures; of one picture, its own map"
    told = {}
    for sent, most in (("mean", 5), ("each", 5), ("mean", 1)):
        hyper = {**facts.run.settings.hyper, "sent_maps": sent, "maps_per_class": most}
        told[sent, most] = leaving(as_set(facts, tmp_path, hyper=hyper))
    assert mean in leaving(facts) and mean in told["mean", 5]
    assert "of each class the single maps of at most 5 training pictures" in told["each", 5]
    assert "of each class the single maps of at most 1 training picture" in told["mean", 1]  # a mean of one is that one
    results = (Path(__file__).parents[3] / "docs/results/what_leaves.md").read_text()
    for words, sent in (("single map", "one a picture"), ("mean of five", "the mean of five")):
        (line,) = [
            one for one in results.splitlines() if one.startswith(f"| maps, {sent} | re-identification, same picture")
        ]
        figure, floor = (float(re.match(r"[\d.]+", one.strip())[0]) for one in line.split("|")[3:5])
        for text in told.values():
            assert f"{words} " in text and f"{figure:.0f} %" in text and f"a guess is right in {floor:.0f} %" in text
    assert "what_leaves.md" not in leaving(read_run(finished["local"]))


def test_what_was_sent_before_the_first_round_is_counted(finished):
    """`Every byte between them is counted`: also features, before the first round. Sums of metrics.jsonl, by hand."""
    facts = read_run(finished["fedavg"])
    assert facts.lines[0]["round"] == 0 and "features" in facts.summary["travels"]
    text = leaving(facts)
    for way in ("up", "down"):
        sent = [(line["round"], line[f"bytes_{way}"]) for line in facts.lines]
        first, whole = sum(n for round_, n in sent if round_ == 0), sum(n for _, n in sent)
        for when, value in (("before the first round", first), ("in the whole run", whole)):
            assert re.search(rf"bytes {way} {when}, all sites\n[\d.]+ \w+ \({value:,} bytes\)", text)
    assert "mean and spread over a site's training pictures" in text and "without a name" not in text


def test_privacy_noise_is_told_with_what_it_covers_and_for_whom(finished, noised):
    """Epsilon, delta, budget and what left without noise: an epsilon alone would promise more than it holds."""
    facts = read_run(noised)
    text = leaving(facts)
    assert (
        "Privacy noise: epsilon" in text and "at delta 1e-05" in text and "weights left the sites without noise" in text
    )
    assert "for one picture (several of one patient cost more), given the encoders" in text
    assert "The privacy budget of each site was 40." in text and "It came from the seed" in text
    for spent in facts.summary["epsilon_spent"].values():
        assert f"{math.ceil(spent * 1000) / 1000:.3f}" in text
    assert "Nothing that left carries privacy noise" in leaving(read_run(finished["fedevprompt"]))


def test_each_epoch_sends_a_feature_of_each_picture_and_noise_one(noised, tmp_path):
    """FedCLF, section III: what of Q_l a round made travels, E rows of a picture and at most K; with noise one."""
    facts = read_run(noised)
    bank, pictures, epochs = np.arange(128), 20, 3
    assert len(made_in_round(bank, pictures, epochs)) == epochs * pictures
    assert len(made_in_round(bank, pictures, epochs=9)) == len(bank)
    quiet = {name: value for name, value in facts.run.settings.hyper.items() if name != "dp_noise"}
    for hyper, words in ((quiet, "3 vectors"), ({**quiet, "dp_noise": 1.0}, "1 vector")):
        told = f"without a name: in a round at most {words} of each picture, and at most 128 in all"
        assert told in leaving(as_set(facts, tmp_path, hyper=hyper, epochs=epochs))


def test_the_bytes_of_a_live_site_are_its_own(finished):
    """Its page called them "all sites", of which it knows nothing."""
    facts = read_run(finished["fedavg"])
    live = replace(facts, run=replace(facts.run, summary={**facts.summary, "site_sha256": "0" * 64}))
    assert "bytes up in a round, all sites\n" in leaving(facts)
    assert "bytes up in a round\n" in leaving(live) and "all sites\n" not in leaving(live)
