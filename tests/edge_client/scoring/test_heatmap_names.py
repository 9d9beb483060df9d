"""A stored result goes on pointing at its own heat map. Source: docs/reference/scores.md, "The picture"."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.edge_client.scoring.drawn_pictures import one_hot, score_with
from tests.edge_client.scoring.test_score_files import scored

from edgefl_client import Scorer
from edgefl_client.scoring.pictures import FORMATS, PictureReader
from edgefl_client.scoring.score_files import ScoringJob, model_digits, rule_digits, score_files
from edgefl_protocol.pictures.score import ModelInfo


def test_a_heat_map_belongs_to_one_picture_for_good(run, files, lab):
    """docs/reference/scores.md: cameras count from 1 every day, and Monday's result still points at Monday's map."""
    for day, size in (("mon", (60, 50)), ("tue", (50, 60)), ("mon/again", (60, 50))):
        (files / day).mkdir()
        (files / day / "IMG_0001.png").write_bytes(lab.encoded(lab.photo(*size)))
    (monday,) = scored(run, "mon/IMG_0001.png", "--heatmap", "maps")[1]
    drawn = (files / monday["heatmap"]).read_bytes()
    (tuesday,) = scored(run, "tue/IMG_0001.png", "--heatmap", "maps")[1]
    assert tuesday["heatmap"] != monday["heatmap"] and (files / monday["heatmap"]).read_bytes() == drawn
    same = scored(run, "tue/IMG_0001.png", "mon", "--heatmap", "maps")[1]  # whatever else is scored, in any order
    assert [line["heatmap"] for line in same] == [tuesday["heatmap"], monday["heatmap"], monday["heatmap"]]
    digest = hashlib.sha256((files / "mon" / "IMG_0001.png").read_bytes()).hexdigest()
    model = monday["model"]["sha256"]
    assert monday["heatmap"] == f"maps/IMG_0001-{digest[:16]}-{model[:8]}.heatmap.png"
    assert (files / monday["heatmap"]).read_bytes() == drawn and len(list((files / "maps").iterdir())) == 2


def test_a_heat_map_belongs_to_one_model_and_its_values_for_good(run, files, lab):
    """docs/reference/scores.md: the picture goes to a second model, or its owner's values, and both results stay."""
    (one,) = scored(run, "good.png", "--heatmap", "maps")[1]
    drawn = (files / one["heatmap"]).read_bytes()
    (files / "model.edgefl").write_bytes(lab.bundle_bytes(version=9))
    (second,) = scored(run, "good.png", "--heatmap", "maps")[1]
    assert second["heatmap"].endswith(f"-{second['model']['sha256'][:8]}.heatmap.png")
    assert (files / one["heatmap"]).read_bytes() == drawn and len(list((files / "maps").iterdir())) == 2
    bundle = ModelInfo(id="m", sha256="a" * 64, version=1, state_kind="bundle", state_sha256="b" * 64)
    personal = [replace(bundle, state_kind="personal", state_sha256=one * 64) for one in "bc"]
    assert [model_digits(one) for one in (bundle, *personal)] == [
        "a" * 8,
        f"{'a' * 8}-{'b' * 8}",
        f"{'a' * 8}-{'c' * 8}",
    ]


def test_a_long_name_has_a_heat_map_too(run, files):
    """docs/reference/scores.md: a name as long as file systems allow (255 bytes) is cut, not refused."""
    long = f"{'ä' * 125}a.png"
    (files / "good.png").rename(files / long)
    code, (line,), _ = scored(run, long, "--heatmap", "maps")
    assert code == 0 and Path(line["heatmap"]).name.startswith("ä" * 75 + "-")
    assert (files / line["heatmap"]).exists()


def test_a_heat_map_belongs_to_the_rules_that_judged_for_good(run, files, lab):
    """docs/reference/scores.md: another threshold says the opposite, and both results stay."""
    (usual,) = scored(run, "good.png", "--heatmap", "maps")[1]
    drawn = (files / usual["heatmap"]).read_bytes()
    (strict,) = scored(run, "good.png", "--heatmap", "maps", "--refer-above", "0.01")[1]
    (other,) = scored(run, "good.png", "--heatmap", "maps", "--refer-above", "0.02")[1]
    assert (usual["refer"], strict["refer"], other["refer"]) == (False, True, True)
    named = {one["heatmap"] for one in (usual, strict, other)}
    assert len(named) == len(list((files / "maps").iterdir())) == 3  # each picture tells its threshold
    assert (files / usual["heatmap"]).read_bytes() == drawn != (files / strict["heatmap"]).read_bytes()
    before, _, end = strict["heatmap"].removesuffix(".heatmap.png").rpartition("-")
    assert f"{before}.heatmap.png" == usual["heatmap"] and len(bytes.fromhex(end)) == 4
    for own in ("0.9", None):  # the card's own threshold, given or not
        (same,) = scored(run, "good.png", "--heatmap", "maps", *(("--refer-above", own) if own else ()))[1]
        assert same["heatmap"] == usual["heatmap"]
    (again,) = scored(run, "good.png", "--heatmap", "maps", "--refer-above", "0.01")[1]
    assert again["heatmap"] == strict["heatmap"] and len(list((files / "maps").iterdir())) == 3


def test_a_heat_map_of_an_expired_model_takes_no_other_ones_place(lab, make_bundle, tmp_path):
    """docs/reference/scores.md, `model_expired`: `watch` finds a copy later and refers it; the first result stays."""
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo(60, 40)))
    now, found = [lab.NOW_MS], []
    scorer = Scorer(make_bundle(expires_ms=lab.NOW_MS + 1000), threads=1, clock=lambda: now[0])
    with PictureReader(FORMATS) as reader:
        job = ScoringJob(scorer=scorer, reader=reader, heatmaps=tmp_path, not_drawn=pytest.fail)
        for now[0] in (lab.NOW_MS, lab.NOW_MS + 1000):
            found += score_files(job, [str(tmp_path / "a.png")])
    assert [one.refer_reasons for one in found] == [(), ("model_expired",)]
    assert found[0].heatmap != found[1].heatmap and Path(found[0].heatmap).exists()


def test_digits_of_rules_follow_reasons_and_every_threshold():
    """None by the bundle's own, so that names stay what they were; the model's name and the picture count elsewhere."""
    score = score_with(one_hot(7, 1, 1))
    changed = [
        replace(score, refer=True, refer_reasons=("vacuity",)),
        *(replace(score, **{name: 0.3}) for name in ("suspicious_from", "vacuity_from", "entropy_from")),
        replace(score, dissonance_from=0.3),
    ]
    assert rule_digits(score, own_rules=True) is None
    assert len({rule_digits(one, own_rules=False) for one in (score, *changed)}) == 6
    assert rule_digits(replace(score, image="y"), own_rules=False) == rule_digits(score, own_rules=False)
