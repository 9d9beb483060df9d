"""The audit in a report: each verdict with its reason, units, and how many sites were measured."""

import html
import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.trainer.audit.conftest import a_result
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.audit.line import MEANINGS
from edgefl_trainer.audit.result import AuditResult
from edgefl_trainer.reports.page import report_page
from edgefl_trainer.reports.run_facts import read_run

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    shutil.copytree(finished["fedavg"], tmp_path / "run")
    return tmp_path / "run"


def of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def shown(folder: Path, found: AuditResult) -> str:
    """The words of the page, with an audit in the run's folder."""
    (folder / "audit.json").write_text(json.dumps(found.to_json(list(of(folder)["sites"]))))
    return words(report_page([read_run(folder)], NOW))


def words(page: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def test_an_audit_is_shown_where_there_is_one_with_the_reason_of_each_verdict(folder):
    """The page had keys for headings, shares as 0.032, and a verdict without the control that was needed."""
    assert "Audit of what leaves" not in words(report_page([read_run(folder)], NOW))
    text = shown(folder, a_result(of(folder)["state_sha256"], tuple(of(folder)["sites"])))
    text = text[text.index("Audit of what leaves") :]
    for said in (
        "0.625 0.500 to 0.700 0.510 0.750 needed 0.800",
        "control 0.750, needed 0.800: this attack could not have shown a leak",
        "true positives at 1 % false ones 0.0 % (0.0 to 3.2 %)",
        "no line proves that nothing leaks",
        "rows <b>",
        "What was not attacked",
        "too few <i>",
        *MEANINGS.values(),
    ):
        assert said in text, said
    for key in ("needs", "not attacked ", "floor_of", "its low", "state sha256", "Never attacked"):
        assert key not in text.replace("What was not attacked", ""), key


def test_the_floor_is_told_beside_each_figure(folder):
    """Figure minus floor with its verdict, and of a line of an earlier edgefl that there is none."""
    found = a_result(of(folder)["state_sha256"], tuple(of(folder)["sites"]))
    assert "not kept by the earlier edgefl" in shown(folder, found)
    paired = {"control": 0.9, "drawn": 29, "drawn_of": "site and class"}
    paired |= {"minus_floor": 0.115, "minus_floor_interval": (0.01, 0.3)}
    text = shown(folder, replace(found, lines=(replace(found.lines[0], **paired),)))
    assert "0.510 above the floor 0.900" in text
    assert "+0.115 (0.010 to 0.300), above the floor; drawn: 29 pairs of site and class" in text
    few = {**paired, "drawn": 9, "interval": None, "minus_floor_interval": None}
    text = shown(folder, replace(found, lines=(replace(found.lines[0], **few),)))
    assert "0.625 no interval 0.510 not told apart from the floor" in text and "and an interval needs 10" in text


def test_only_kinds_and_sites_with_a_figure_of_this_state_were_measured(folder):
    """An audit of what fedavg's weights tell says nothing of its features, one of another state says nothing.

    And one of some sites says nothing of the others: "was measured" stood there, although one site of two was.
    """
    state, sites = of(folder)["state_sha256"], list(of(folder)["sites"])
    assert len(sites) > 1
    text = shown(folder, a_result(state, tuple(sites), kind="prompts and weights"))
    assert "How much prompts and weights tell of them was measured: see the audit below" in text
    assert "How much features tell of them was not measured" in text
    text = shown(folder, a_result(state, (sites[0],), kind="prompts and weights"))
    assert f"How much prompts and weights tell of them was measured at 1 of {len(sites)} sites: see" in text
    assert "Never attacked: " in text and f"{len(sites) - 1} of {len(sites)} sites. Nothing is known" in text
    text = shown(folder, a_result("0" * 64, tuple(sites), kind="prompts and weights"))
    assert "tell of them was measured" not in text and "another state" in text and "0.625" not in text


@pytest.mark.parametrize("change", [{"hello": 1}, [], {"lines": []}])
def test_a_file_that_is_no_audit_is_one_sentence(change, folder, tmp_path):
    (folder / "audit.json").write_text(json.dumps(change))
    found = edgefl_train("report", folder, "-o", tmp_path / "a.html").sentence()
    assert "audit.json is damaged" in found and "edgefl-train audit" in found
    assert not (tmp_path / "a.html").exists()
