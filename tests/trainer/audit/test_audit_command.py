"""`edgefl-train audit`: lines of a finished run as text, JSON and file; faults in a sentence. Checks 53 and 54."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.trainer.audit.conftest import METHODS
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.audit import payload_lines
from edgefl_trainer.audit.audited import open_audit
from edgefl_trainer.audit.bounds import Between
from edgefl_trainer.audit.line import MEANINGS, AuditLine, NotAttacked
from edgefl_trainer.audit.member_lines import membership_lines
from edgefl_trainer.audit.payloads import PicturePayload, release_of
from edgefl_trainer.contract import Method, Site, State
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.engine.sites import read_sites
from edgefl_trainer.models.backbones import load_backbone


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_each_kind_that_travels_is_attacked_or_named(method: str, run_of: Callable[[str], Path], small: None) -> None:
    """The same lines as JSON and in the run's folder; each has floor, control, interval and number of pictures."""
    found = edgefl_train("audit", run_of(method), "--pictures", "20", "--json").json()
    assert json.loads((run_of(method) / "audit.json").read_text()) == found
    summary = json.loads((run_of(method) / "summary.json").read_text())
    told = {word for one in [*found["lines"], *found["not_attacked"]] for word in one["kind"].split(" and ")}
    assert {*summary["travels"], "model"} <= told
    kinds, scores = {line["kind"] for line in found["lines"]}, "probe" not in summary  # else it left an encoder alone
    assert {*METHODS[method], *["model"][:scores]} <= kinds
    for line in found["lines"]:
        for value, between in (("figure", "interval"), ("minus_floor", "minus_floor_interval")):
            assert (line[between] is None) == (line["drawn"] < 10)
            low, high = line[between] or (-1.0, 1.0)
            assert low <= line[value] <= high and line["pictures"] > 0
        assert line["minus_floor"] == pytest.approx(line["figure"] - line["floor"])
        wanted = "inconclusive" if line["control"] < line["needs"] else line["verdict"]
        assert line["verdict"] == wanted
    photos = {line["kind"] for line in found["lines"] if line["attack"].endswith("another photo")}
    assert photos <= ({"maps"} if scores else {"features"})  # both photos of a lesion took part in a mean over a class


def test_a_site_that_is_refused_is_named_and_the_others_are_attacked(
    run_of: Callable[[str], Path], small: None
) -> None:
    audited = open_audit(open_run(run_of("fedevprompt")), (), 20, lambda line: None)
    made = payload_lines.release_of

    def refusing(run: FinishedRun, method: Method, server: State, site: Site, kind: str) -> object:
        return NotAttacked(kind, "all", "x") if site.name == "site-1" else made(run, method, server, site, kind)

    with mock.patch.object(payload_lines, "release_of", refusing):
        refused, line = itertools.islice(payload_lines.payload_lines(audited), 2)
    assert refused == NotAttacked("maps", "all", "x (of site-1)", ("site-1",))
    assert isinstance(line, AuditLine) and line.sites == ("site-2", "site-3")
    assert line.against == "the mean of the maps of at most 5 pictures of a class"  # what the preset sends


def test_a_site_that_is_named_twice_is_attacked_once(run_of: Callable[[str], Path], small: None) -> None:
    """Its pictures counted as twice as many, so the intervals were too narrow."""
    named = ("site-2", "site-1", "site-2")
    assert open_audit(open_run(run_of("fedevprompt")), named, 20, lambda line: None).attacked == named[:2]


@pytest.mark.parametrize("queue", [2, 3, 128])
def test_no_more_pictures_are_exchanged_at_once_than_a_bank_holds(queue: int, cached: None) -> None:
    """FedCLF sends at most K features: of more pictures some had none. A piece is an exchange of its own, and in one
    of a single picture batch norm would have nothing to compare."""
    settings = RunSettings(
        method="fedclf",
        data=("lesions:sites=1,images=20,px=36",),
        backbone="cnn:test_resnet",
        image_px=36,
        device="cpu",
        hyper={"queue": queue, "batch": 4},
    )
    method, backbone = settings.build_method(), load_backbone("cnn:test_resnet", image_px=36, seed=0)
    _, task, sites = read_sites(settings, method, backbone, None)
    run, [site] = mock.Mock(sites=(), settings=settings), sites.values()
    release = release_of(run, method, method.start(task, [site.name]), site, "features")
    assert isinstance(release, PicturePayload) and release.over == "picture"
    pictures = site.unlabelled.images[site.unlabelled.places[:7]]
    found, first = release.sent(pictures), {2: 2, 3: 3, 128: 7}[queue]
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(7), abs=1e-2)  # float16
    assert np.array_equal(found[:first], release.sent(pictures[:first]))
    if queue == 2:
        assert np.array_equal(found[6:], release.sent(pictures[[6, 0]])[:1])


@pytest.mark.parametrize("over", ["class", "site"])
def test_pictures_that_share_what_was_sent_are_drawn_together(
    over: str, run_of: Callable[[str], Path], small: None
) -> None:
    """Each picture was a trial of its own, also where all of a class at a site share one mean and so one guess."""
    audited = open_audit(open_run(run_of("fedevprompt")), (), 20, lambda line: None)
    made, seen = payload_lines.release_of, set[str]()

    def of_many(run: FinishedRun, method: Method, server: State, site: Site, kind: str) -> object:
        seen.update(site.name if over == "site" else f"{site.name} {k}" for k in site.train.targets)
        found = made(run, method, server, site, kind)
        assert not isinstance(found, NotAttacked)
        return replace(found, over=over, by_member=None)

    with mock.patch.object(payload_lines, "release_of", of_many):
        lines = [line for line in payload_lines.payload_lines(audited) if isinstance(line, AuditLine)]
    assert [line.family for line in lines] == ["re-identification", "reconstruction"]
    for line in lines:
        assert line.drawn is not None and 3 <= line.drawn <= len(seen) < line.pictures
        assert line.drawn_of == {"class": "site and class", "site": "site"}[over]
        assert (line.interval is None) == (line.minus_floor_interval is None) == (line.drawn < 10)
        assert line.minus_floor == pytest.approx(line.figure - line.floor)


def test_the_text_says_what_the_json_does_and_an_audit_of_one_site_keeps_the_others(
    run_of: Callable[[str], Path], tmp_path: Path, small: None
) -> None:
    """Of one site, then of another; and the picture at 14 px, the control, finds its changed view among ten."""
    copy = tmp_path / "copy"
    shutil.copytree(run_of("fedevprompt"), copy, ignore=shutil.ignore_patterns("audit.json"))
    outcome = edgefl_train("audit", copy, "--pictures", "20", "--site", "site-1")
    assert outcome.code == 0, outcome.err
    first = json.loads((copy / "audit.json").read_text())
    assert first["never_attacked"] == ["site-2", "site-3"] and "never attacked: site-2 and site-3" in outcome.out
    for line in first["lines"]:
        assert line["sites"] == ["site-1"]
        share = line["attack"].startswith("re-identification")
        shown = [f"{100 * line[key]:.1f} %" if share else f"{line[key]:.3f}" for key in ("figure", "control", "needs")]
        assert all(number in outcome.out for number in shown) and line["verdict"] in outcome.out
        assert f"control {shown[1]}, needed {shown[2]}: " in outcome.out.lower()
    assert "true positives at 1 % false ones" in outcome.out and "its low" not in outcome.out
    line = next(one for one in first["lines"] if one["attack"] == "re-identification, same picture, changed")
    assert line["control"] > 0.5

    refused = edgefl_train("audit", copy, "--pictures", "21", "--site", "site-2").sentence()
    assert "--pictures 20" in refused and json.loads((copy / "audit.json").read_text()) == first
    both = edgefl_train("audit", copy, "--pictures", "20", "--site", "site-2", "--json").json()
    assert [line for line in both["lines"] if line["sites"] == ["site-1"]] == first["lines"]
    assert {*itertools.chain(*(line["sites"] for line in both["lines"]))} == {"site-1", "site-2"}
    assert both["never_attacked"] == ["site-3"]


def a_line(interval: Between | None = (0.0, 0.1), **changes: Any) -> AuditLine:
    values = {"figure": 0.01, "floor": 0.005, "control": 0.9, "needs": 0.5, "target": 0.05, **changes}
    words = dict.fromkeys(("kind", "attack", "against", "measure", "floor_of", "control_of"), "x")
    return AuditLine(**words, **values, interval=interval, pictures=200, sites=("a",))


def test_a_control_that_fails_is_never_safe() -> None:
    """Check 53: a control without protection must succeed, else the figure says nothing."""
    assert a_line((0.0, 0.04)).verdict == "within the target"
    assert a_line((0.0, 0.04), control=0.4).verdict == "inconclusive"
    assert a_line((0.06, 0.1), figure=0.08, control=0.4).verdict == "inconclusive"
    assert a_line(control=0.4).reason == "control 0.400, needed 0.500: this attack could not have shown a leak"
    assert a_line(control=0.49996).reason.startswith("control 0.49996, needed 0.50000: ")


@pytest.mark.parametrize(
    ("interval", "floor", "verdict"),
    [
        ((0.003, 0.029), 0.005, "within the target"),
        ((0.005, 0.143), 0.005, "not told apart from the target"),  # a figure of 0.042 alone shows nothing
        ((0.018, 0.162), 0.005, "not told apart from the target"),  # above the floor, and that is not above the target
        ((0.06, 0.1), 0.005, "above the target"),
        ((0.06, 0.1), 0.08, "not told apart from the floor"),
        ((0.06, 0.1), 0.1, "no more than the floor"),
        ((0.09, 0.1), 0.08, "above the target"),
        ((0.0, 0.05), 0.08, "within the target"),
    ],
)
def test_a_verdict_holds_for_the_whole_interval(interval: tuple[float, float], floor: float, verdict: str) -> None:
    """Target 0.05: a line is on one side of target or floor, the higher of them, or not told apart from it."""
    line = a_line(interval, figure=sum(interval) / 2, floor=floor)
    assert line.verdict == verdict and verdict in MEANINGS
    assert line.reason.startswith("control 0.900, needed 0.500: the attack works") and "could not" not in line.reason


@pytest.mark.parametrize(
    ("interval", "floor", "minus_floor", "verdict", "beside_floor"),
    [
        ((0.04, 0.077), 0.033, (-0.01, 0.06), "not told apart from the target", "not told apart from the floor"),
        ((0.06, 0.1), 0.03, (-0.01, 0.1), "not told apart from the floor", "not told apart from the floor"),
        ((0.06, 0.1), 0.07, (0.001, 0.02), "above the target", "above the floor"),  # pairs tell what one side does not
        ((0.0, 0.04), 0.005, (0.001, 0.03), "within the target", "above the floor"),
        ((0.0, 0.1), 0.08, (-0.06, -0.01), "no more than the floor", "no more than the floor"),
        (None, 0.005, None, "not told apart from the target", "not told apart from the floor"),
        (None, 0.08, None, "not told apart from the floor", "not told apart from the floor"),
    ],
)
def test_the_floor_is_compared_picture_by_picture(
    interval: Between | None, floor: float, minus_floor: Between | None, verdict: str, beside_floor: str
) -> None:
    """Target 0.05. A fixed floor beside the interval of the figure says nothing of their difference."""
    figure = sum(interval or (0.02, 0.02)) / 2
    pairs = {"minus_floor": figure - floor, "minus_floor_interval": minus_floor, "drawn_of": "site and class"}
    line = a_line(interval, figure=figure, floor=floor, drawn=20 if interval else 9, **pairs)
    assert (line.verdict, line.floor_verdict) == (verdict, beside_floor)
    assert beside_floor in line.beside_floor and "pairs of site and class" in line.beside_floor
    assert (interval is None) == ("no interval, for it would draw 9 pairs of site and class, and 10" in line.reason)
    assert (interval is None) == line.beside_floor.endswith(
        "drawn: 9 pairs of site and class, and an interval needs 10"
    )
    assert replace(line, control=0.4).floor_verdict == replace(line, control=0.4).verdict == "inconclusive"


def test_points_are_told_beside_shares() -> None:
    line = a_line((0.04, 0.077), figure=0.056, floor=0.033, drawn=29, drawn_of="lesion")
    line = replace(line, attack="re-identification, x", minus_floor=0.023, minus_floor_interval=(-0.012, 0.071))
    assert line.beside_floor == "+2.3 points (-1.2 to 7.1), not told apart from the floor; drawn: 29 lesions"
    assert a_line().beside_floor.startswith("not kept by the earlier edgefl") and a_line().floor_verdict is None


def test_too_few_pictures_are_a_sentence(finished: dict[str, Path]) -> None:
    """Twenty pictures a site: no attack has enough, so nothing is said to be safe, and no file is left.

    Each reason stands beside what was not attacked, and of which attack it is.
    """
    said = edgefl_train("audit", finished["fedevprompt"])
    assert said.code == 2 and "could be attacked" in said.sentence()
    assert re.search(r"^not attacked: maps, re-identification and reconstruction: .*200 are needed$", said.err, re.M)
    assert re.search(r"^not attacked: model, membership: .*100 of each are needed$", said.err, re.M)
    assert not (finished["fedevprompt"] / "audit.json").exists()


def test_a_network_with_tokens_inside_is_named_with_what_cannot_be_read() -> None:
    """Of PEP-FedPT: "its tokens" stood alone, of no kind and no attack."""
    model = mock.Mock()
    model.score_module.options.insert = object()
    run = mock.Mock(sites=("a",), predictor=lambda site: model)
    found = payload_lines.release_of(run, mock.Mock(), State(), mock.Mock(), "prototypes")
    assert isinstance(found, NotAttacked) and "its tokens" not in found.why
    start = "not attacked: prototypes, re-identification and reconstruction: the model puts prompt tokens"
    assert found.told.startswith(start)


def test_a_site_of_a_live_federation_cannot_be_audited_alone(finished: dict[str, Path], tmp_path: Path) -> None:
    """Its folder has no state of the server and no other site: the reasons that were told were false, and reassured."""
    copy = tmp_path / "copy"
    shutil.copytree(finished["local"], copy)
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps({**summary, "site_sha256": "0" * 64}))
    said = edgefl_train("audit", copy).sentence()
    assert "holds one site's part of a federation" in said and "server's state and the other sites' pictures" in said


def test_without_another_site_there_is_no_floor(run_of: Callable[[str], Path], small: None) -> None:
    """It read as a fault of the model, which "cannot answer"."""
    audited = open_audit(open_run(run_of("fedevprompt")), ("site-1",), 20, lambda line: None)
    alone = replace(audited, sites={"site-1": audited.sites["site-1"]})
    (found,) = membership_lines(alone, "model", {"site-1": audited.run.predictor("site-1")}, {})
    assert isinstance(found, NotAttacked) and found.sites == ("site-1",)
    assert found.why.startswith("there is no other site, and the floor is a model")


def test_what_cannot_be_audited_is_a_sentence(
    run_of: Callable[[str], Path], finished: dict[str, Path], tmp_path: Path, small: None
) -> None:
    """An unfinished run, no run, an unknown site, data that is gone."""
    copy = tmp_path / "copy"
    shutil.copytree(run_of("fedevprompt"), copy)
    assert "has no site 'nowhere'" in edgefl_train("audit", copy, "--site", "nowhere").sentence()
    (copy / "summary.json").unlink()
    assert "is not finished" in edgefl_train("audit", copy).sentence()
    assert "is not a run directory" in edgefl_train("audit", tmp_path / "none").sentence()
    gone = tmp_path / "gone"
    shutil.copytree(finished["local"], gone)
    text = (gone / "config.toml").read_text()
    (gone / "config.toml").write_text(text.replace("folder:", "folder:/nowhere"))
    assert "/nowhere" in edgefl_train("audit", gone).sentence()


def test_data_that_changed_are_refused(run_of: Callable[[str], Path], tmp_path: Path, small: None) -> None:
    """Rows that the run did not learn from would be attacked as if it had."""
    copy = tmp_path / "copy"
    shutil.copytree(run_of("fedevprompt"), copy)
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("images=60", "images=61"))
    assert "have changed since" in edgefl_train("audit", copy).sentence()
