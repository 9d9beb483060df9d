"""`audit.json`: read as it was written, joined with what was found of other sites, and refused where it is none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.trainer.audit.conftest import a_result

from edgefl_trainer.audit.line import NotAttacked
from edgefl_trainer.audit.result import kept_of_others, read_audit
from edgefl_trainer.audit.text import audit_text
from edgefl_trainer.errors import RunError

STATE, SITES = "5" * 64, ("a", "b", "c")


def written(folder: Path, **changes: Any) -> dict[str, Any]:
    found = {**a_result(STATE, ("a", "b"), ("b",)).to_json(SITES), **changes}
    (folder / "audit.json").write_text(json.dumps(found))
    return found


def a_run(folder: Path) -> mock.Mock:
    return mock.Mock(folder=folder, summary={"state_sha256": STATE, "sites": {site: {} for site in SITES}})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_audit(tmp_path) is None
    found = written(tmp_path)
    read = read_audit(tmp_path)
    assert read is not None and json.loads(json.dumps(read.to_json(SITES))) == found
    assert found["never_attacked"] == ["c"] and found["pictures"] == 200
    assert "never attacked: c: no line here is of it" in audit_text(read, SITES)


PAIRED = {"drawn": 29, "drawn_of": "site and class", "minus_floor": 0.115, "minus_floor_interval": (-0.1, 0.3)}
FEW = {**PAIRED, "drawn": 9, "interval": None, "minus_floor_interval": None}


@pytest.mark.parametrize("changes", [PAIRED, FEW])
def test_a_floor_that_was_compared_in_pairs_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    result = a_result(STATE, ("a",))
    result = replace(result, lines=(replace(result.lines[0], **changes),))
    (tmp_path / "audit.json").write_text(json.dumps(result.to_json(SITES)))
    assert read_audit(tmp_path) == result
    assert result.to_json(SITES)["lines"][0]["floor_verdict"] == "inconclusive"
    text = "\n".join(audit_text(result, SITES))
    value, few = (
        ("0.115 (-0.100 to 0.300)", "") if changes is PAIRED else ("0.115 (no interval)", ", and an interval needs 10")
    )
    drawn = f"drawn: {changes['drawn']} pairs of site and class{few}"
    assert f"figure minus floor, of the same pictures: +{value}, inconclusive; {drawn}" in text
    assert (changes is FEW) == ("0.625   no interval" in text)


def test_an_audit_from_before_the_pairs_is_read(tmp_path: Path) -> None:
    """It counted each picture by itself, and compared the floor with the interval: its verdicts stay as they are."""
    old = written(tmp_path)
    for line in old["lines"]:
        for key in (*PAIRED, "floor_verdict"):
            del line[key]
    (tmp_path / "audit.json").write_text(json.dumps(old))
    read = read_audit(tmp_path)
    assert read is not None and {line.floor_verdict for line in read.lines} == {None}
    assert "figure minus floor, of the same pictures: not kept by the earlier edgefl" in "\n".join(
        audit_text(read, SITES)
    )


def changed_line(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: {**found, "lines": [{**found["lines"][0], **changes}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: {"hello": 1}, "it has no"),
        (lambda found: [], "it has no"),
        (lambda found: {key: value for key, value in found.items() if key != "state_sha256"}, "no state_sha256"),
        (lambda found: {**found, "lines": [1]}, "it has no"),
        (changed_line(control=0.9), "verdict of model, membership"),
        (changed_line(figure=float("nan")), "no number"),
        (changed_line(figure=True), "no number"),
        (changed_line(interval=[0.1]), "no number"),
        (changed_line(interval=None), "no interval"),
        (changed_line(**{**PAIRED, "interval": None}), "no interval"),
        (changed_line(**PAIRED, floor_verdict="above the floor"), "beside the floor of model, membership"),
        (changed_line(**{**PAIRED, "drawn_of": "moon"}, floor_verdict="inconclusive"), "'moon' is nothing"),
        (changed_line(**{**PAIRED, "minus_floor": None}, floor_verdict="inconclusive"), "no number"),
        (changed_line(sites=[1]), "sites"),
        (changed_line(more={}), "true positives"),
        (lambda found: {**found, "not_attacked": [{"kind": "maps"}]}, "no attack"),
    ],
)
def test_what_is_no_audit_is_refused(change: Callable[[Any], object], said: str, tmp_path: Path) -> None:
    """The report showed "hello 1" as an audit, and one of nobody knows which run with a figure written by hand."""
    (tmp_path / "audit.json").write_text(json.dumps(change(written(tmp_path))))
    with pytest.raises(RunError, match=said) as refused:
        read_audit(tmp_path)
    assert f"make it anew with `edgefl-train audit {tmp_path}`" in str(refused.value)


def test_only_what_is_of_other_sites_is_kept(tmp_path: Path) -> None:
    """A line over two sites stays when one of them is attacked anew; that one's own line does not."""
    run = a_run(tmp_path)
    assert kept_of_others(run, ["a"], 200) == ([], [])
    missing = [NotAttacked("maps", "x", "y", ("b",)), NotAttacked("maps", "x", "of all")]
    written(tmp_path, not_attacked=[{**vars(one), "sites": list(one.sites)} for one in missing])
    assert [line.sites for line in kept_of_others(run, ["a"], 200)[0]] == [("a", "b"), ("b",)]
    lines, left_out = kept_of_others(run, ["b"], 200)
    assert [line.sites for line in lines] == [("a", "b")] and left_out == []
    assert kept_of_others(run, ["a"], 200)[1] == missing[:1]
    for names in ([], [*SITES]):
        assert kept_of_others(run, names, 20) == ([], [])


def test_what_cannot_stand_beside_a_new_audit_is_never_joined_with_it(tmp_path: Path) -> None:
    """Another state is another model; other settings are told before the attacks take their minutes."""
    run = a_run(tmp_path)
    with pytest.raises(RunError, match="add that, attack all sites"):
        written(tmp_path)
        kept_of_others(run, ["b"], 20)
    assert kept_of_others(run, ["a", "b"], 20) == ([], [])  # nothing of another site is lost
    written(tmp_path, state_sha256="6" * 64)
    assert kept_of_others(run, ["b"], 20) == ([], [])
    old = written(tmp_path)
    del old["pictures"], old["never_attacked"]
    (tmp_path / "audit.json").write_text(json.dumps(old))
    with pytest.raises(RunError, match="earlier edgefl"):
        kept_of_others(run, ["b"], 200)
