"""What a federation gives each diagnosis: shares and their paired difference by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.federation import federation_scores
from benchmarks.federation.federation_scores import of_the_same_seeds, share_draws
from benchmarks.federation.rare_diagnoses import figures, line

from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, lesion_weights

TARGET = np.array([0, 0, 0, 0, 1, 1, 2, 2])
LESIONS = ("a", "a", "b", "c", "d", "e", "f", "g")
CLASSES = ("NV", "MEL", "DF")


def answered(predicted: list[int]) -> Scored:
    given = np.array(predicted)
    return Scored(np.eye(3)[given], TARGET, given, None, LESIONS)


GOOD, POOR = answered([0, 0, 0, 1, 1, 1, 2, 0]), answered([0, 0, 1, 1, 1, 0, 0, 0])


def test_a_share_over_draws_is_that_of_the_rows_repeated():
    asked, right = TARGET == 2, GOOD.predicted == 2
    weights = np.concatenate(list(lesion_weights(LESIONS, RESAMPLES))).astype(int)
    by_hand = []
    for row in weights:
        again = np.repeat(np.arange(8), row)
        true = asked[again]
        by_hand.append(right[again][true].mean() if true.any() else np.nan)
    np.testing.assert_allclose(share_draws(LESIONS, asked, right), by_hand)


def test_a_difference_is_paired():
    """Equal answers differ by nothing in each draw; of two melanomas one answer more is right."""
    assert line("MEL", [GOOD], [GOOD], [1]) == ["MEL", "2", "2", "100.0", "100.0", "+0.0 [+0.0 to +0.0]", "+0.0"]
    assert line("MEL", [POOR], [GOOD], [1]) == ["MEL", "2", "2", "50.0", "100.0", "+50.0 [+0.0 to +100.0]", "+50.0"]


def test_of_two_seeds_each_figure_is_the_mean_and_each_difference_stands_beside_it():
    """Alone names both melanomas by one seed and one of them by the other; together both, and then none."""
    none = answered([0] * 8)
    found = line("MEL", [GOOD, POOR], [GOOD, none], [1])
    assert (
        found[:5] == ["MEL", "2", "2", "75.0", "50.0"] and found[5].startswith("-25.0 [") and found[6] == "+0.0, -50.0"
    )
    same = [one.strip() for one in figures(CLASSES, [{"x": GOOD}] * 2, [{"x": POOR}] * 2).splitlines()]
    once = [one.strip() for one in figures(CLASSES, [{"x": GOOD}], [{"x": POOR}]).splitlines()]
    assert [one.rsplit("|", 2)[0] for one in same] == [one.rsplit("|", 2)[0] for one in once]


def test_an_arm_that_lacks_a_seed_is_refused_by_name(tmp_path, monkeypatch):
    def made(name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text("{}")

    def run(folder):
        return SimpleNamespace(folder=folder, settings=SimpleNamespace(seed=int(folder.name[-1])))

    monkeypatch.setattr(federation_scores, "open_run", run)
    for name in ("a-s0", "a-s2", "b-s0"):
        made(name)
    with pytest.raises(ValueError, match="b-s2; every arm"):
        of_the_same_seeds(tmp_path, ("a", "b"))
    made("b-s2")
    found = of_the_same_seeds(tmp_path, ("a", "b"))
    assert [[one.folder.name for one in arm] for arm in found] == [["a-s0", "a-s2"], ["b-s0", "b-s2"]]
    with pytest.raises(ValueError, match="c-s0, d-s0"):
        of_the_same_seeds(tmp_path, ("c", "d"))


def test_a_group_is_right_where_a_class_of_it_is_named():
    """NV and DF together: POOR names a class of the group in 4 of 6 rows, GOOD in 5."""
    assert line("benign", [POOR], [GOOD], [0, 2])[1:5] == ["6", "5", "66.7", "83.3"]


def test_the_table_begins_with_the_rarest_and_ends_with_the_mean():
    """Of these three classes melanoma alone asks for a look."""
    lines = figures(CLASSES, [{"x": GOOD}], [{"x": POOR}]).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines]
    assert [row[0] for row in cells] == [
        "MEL", "DF", "NV", "suspicious, named so", "benign, named so", "balanced accuracy, mean of centres",
    ]  # fmt: skip
    assert cells[1][:5] == ["DF", "2", "2", "0.0", "50.0"] and cells[3][1:5] == ["2", "2", "50.0", "100.0"]
    assert cells[4][1:5] == ["6", "5", "66.7", "83.3"]
    assert cells[5][3:5] == ["33.3", "75.0"] and cells[5][5].startswith("+41.7 [")
    assert all(float(row[4]) - float(row[3]) == pytest.approx(float(row[5].split()[0]), abs=0.11) for row in cells)
