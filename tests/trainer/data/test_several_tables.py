"""Rows that a site has in several tables, or shares with another site: docs/reference/data.md, Rows.

A lesion is known by its name inside one table, and at one site across tables.
"""

import shutil
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train, records, write_index

from edgefl_trainer.data import DataError, Federation, load_federation
from edgefl_trainer.data.partitions.make import make_partition
from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.data.site_rows import ROW_KINDS


def lesions(federation: Federation, site: str, kind: str) -> set[str]:
    return {federation.lesions[i] for i in federation.sites[site].rows(kind)}


def year(name: str, numbers: range, **changes: str) -> list[dict[str, str]]:
    """A list of one clinic: a picture of each lesion, which a list of another year may show again."""
    base = {"center": "clinic", "split": ""} | changes
    return [
        {
            "image": f"{name}-{i}",
            "file": f"{name}/{i}.png",
            "label": ("MEL", "NV", "NV", "NV")[i % 4],
            "lesion_id": f"L{i}",
            **base,
        }
        for i in numbers
    ]


@pytest.mark.parametrize("second", ["", "test", "train"])
def test_a_lesion_that_two_tables_of_a_site_show_stands_on_one_side(make_zip, cache: Path, second: str) -> None:
    """Two yearly lists were dealt each by itself: a lesion was learned from in one and judged on in the other."""
    tables = (year("one", range(80)), year("two", range(50, 110), split=second))
    specs = [f"manifest:{make_zip(rows, name=f'{i}.zip')}" for i, rows in enumerate(tables)]
    both = load_federation(specs, image_px=8)
    shown = [lesions(both, "clinic", kind) for kind in ROW_KINDS]
    assert sum(map(len, shown)) == len(set().union(*shown)) == 110
    assert not any("lesions that are judged on" in line for line in both.warnings)
    shared = {f"L{i}" for i in range(50, 80)}
    alone = [load_federation([spec], image_px=8) for spec in specs]
    tests = [lesions(one, "clinic", "test") for one in alone]
    want = {"": tests[0] | tests[1], "test": tests[0] | tests[1], "train": tests[0] - shared}[second]
    assert lesions(both, "clinic", "test") == want
    reverse = load_federation(specs[::-1], image_px=8)
    assert lesions(reverse, "clinic", "test") == want
    dealt = make_partition(specs, PartitionPlan(scheme="natural"), 0)
    assert lesions(load_federation(specs, image_px=8, partition=dealt), "clinic", "test") == want


@pytest.mark.parametrize("third", ["", "train"])
def test_a_lesion_that_moves_at_one_site_moves_at_the_others_of_its_table(make_zip, cache: Path, third: str) -> None:
    """docs/design.md 3: a lesion is never split. One list has it at two sites, another at the first, a third beyond."""
    tables = [
        [*year("a", range(40), center="s1"), *year("b", range(40), center="s2")],
        year("c", range(20, 60), center="s1"),
        [*year("d", range(10, 40), center="s3"), *year("e", range(10, 40), center="s2", split=third)],
    ]
    specs = [f"manifest:{make_zip(rows, name=f'{i}.zip')}" for i, rows in enumerate(tables)]
    for named in (specs[:2], specs[1::-1], specs, specs[::-1]):
        both = load_federation(named, image_px=8)
        judged = set().union(*(lesions(both, site, "test") for site in both.sites))
        learned = set().union(*(lesions(both, site, kind) for site in both.sites for kind in ("train", "tune")))
        assert judged and len(judged) + len(learned) == len(judged | learned) == 60
        assert not any("lesions that are judged on" in line for line in both.warnings)
        if third and len(named) == 3:
            assert judged.isdisjoint(f"L{i}" for i in range(10, 40))  # s2 has them in `train`


def test_tables_of_two_hospitals_move_nothing(make_zip, cache: Path) -> None:
    """They may number their lesions alike; and a site that is not asked for is not there."""
    tables = (year("one", range(80)), year("two", range(80), center="ward"))
    specs = [f"manifest:{make_zip(rows, name=f'{i}.zip')}" for i, rows in enumerate(tables)]
    mixed = f"manifest:{make_zip([*tables[0], *year('three', range(80), center='ward')], name='3.zip')}@rows=50/10/40"
    both = load_federation(specs, image_px=8)
    for name, spec in zip(("clinic", "ward"), specs, strict=True):
        assert lesions(both, name, "test") == lesions(load_federation([spec], image_px=8), name, "test")
    some = load_federation([specs[0], f"{mixed}@site=ward"], image_px=8)
    assert lesions(some, "clinic", "test") == lesions(both, "clinic", "test")


def test_a_site_learns_without_labels_from_no_lesion_that_another_is_judged_on(make_zip, cache: Path) -> None:
    """One table is one numbering: data.md, Rows, `unlabelled`. That of another table may number its own alike."""
    judged = [*year("a", range(10), split="test"), *year("b", range(10, 20), split="train")]
    free = [{**row, "label": ""} for row in year("u", range(20), center="ward", split="unlabelled")]
    own = year("w", range(30, 40), center="ward", split="train")
    one = f"manifest:{make_zip([*judged, *free, *own], name='one.zip')}"
    kept = {f"L{i}" for i in range(10, 20)}
    for spec in (one, f"{one}@site=ward"):  # whoever else is selected
        assert lesions(load_federation([spec], image_px=8, unlabelled="site"), "ward", "unlabelled") == kept
    specs = [f"manifest:{make_zip(rows, name=f'{i}.zip')}" for i, rows in enumerate((judged, [*free, *own]))]
    apart = load_federation(specs, image_px=8, unlabelled="site")
    assert lesions(apart, "ward", "unlabelled") == {f"L{i}" for i in range(20)}


def test_a_picture_that_is_learned_from_without_a_label_is_told(tmp_path: Path, cached) -> None:
    """`run` told it, `data` did not; i4 is judged on, and i0, which has its pixels, is unlabelled."""
    rows = [{**row, "lesion_id": f"L{i}"} for i, row in enumerate(records())]
    rows[0] |= {"label": "", "split": "unlabelled"}
    root = write_index(tmp_path / "w", rows)
    shutil.copy(root / "pictures/i0.png", root / "pictures/i4.png")
    told = "are learned from or tuned on, such as i4, which is i0: figures on them are too high"
    assert told in edgefl_train("data", f"manifest:{root}").err
    assert any(told in line for line in load_federation([f"manifest:{root}"], image_px=36, unlabelled="site").warnings)
    rows[0]["lesion_id"] = "L4"  # of a lesion that is judged on no run learns
    write_index(tmp_path / "w", rows)
    shutil.copy(root / "pictures/i0.png", root / "pictures/i4.png")
    assert "which is i0" not in edgefl_train("data", f"manifest:{root}").err
    federation = load_federation([f"manifest:{root}"], image_px=36, unlabelled="site")
    assert not any("which is i0" in line for line in federation.warnings)


def test_lesions_of_other_data_are_known_by_their_name_at_their_site(make_zip, cache: Path) -> None:
    """docs/design.md 3: a lesion is never split between learning and judging, be its picture another one."""
    learned, ward = year("one", range(40)), year("w", range(40, 80), center="ward")
    specs = [f"manifest:{make_zip([*learned, *ward], name='a.zip')}"]
    specs.append(f"manifest:{make_zip([*year('two', range(80)), *year('v', range(40), center='ward')], name='b.zip')}")
    own, other = (load_federation([spec], image_px=8, all_test=spec is specs[1]) for spec in specs)
    again, number = own.lesions_learned_among(other, ["clinic", "ward"])
    assert again == sorted(lesions(own, "clinic", "train") | lesions(own, "clinic", "tune")) and number == 120
    assert len(again) == 30


# What `data` refuses, `run` refuses in the same words.


def test_classes_that_a_task_gathers_may_differ_in_case(tmp_path: Path, cached) -> None:
    """`run --task` takes them, and `data --task` refused them; without a task both refuse."""
    found = [{**row, "label": row["label"].lower() if i < 4 else row["label"]} for i, row in enumerate(records())]
    spec = f"manifest:{write_index(tmp_path / 'w', found)}"
    assert load_federation([spec], image_px=36, task="mal=MEL,mel:rest").classes == ("mal", "rest")
    gathered = edgefl_train("data", spec, "--task", "mal=MEL,mel:rest")
    assert gathered.code == 0 and "same way in every row" not in gathered.out
    assert edgefl_train("data", spec, "--task", "nevus").code == 0
    plain = edgefl_train("data", spec)
    assert plain.code == 1 and "same way in every row" in plain.out


@pytest.mark.parametrize(
    ("suffixes", "change", "words"),
    [
        (("", ""), 0, "Site east has the image 'i0' twice; name each data source once."),
        (("@rows=60/20/20", "@rows=70/15/15"), 1, "Site east has rows of several data sources with different @rows"),
    ],
)
def test_what_a_site_has_in_two_sources_is_refused_alike(tmp_path: Path, cached, suffixes, change, words) -> None:
    """An image in both, or other shares in each: `data` passed what `run` refused."""
    specs = []
    for number, suffix in enumerate(suffixes):
        rows = [{**row, "image": f"{row['image']}{'-b' * number * change}", "split": ""} for row in records()]
        specs.append(f"manifest:{write_index(tmp_path / str(number), rows)}{suffix}")
    with pytest.raises(DataError) as refused:
        load_federation(specs, image_px=36)
    outcome = edgefl_train("data", *specs)
    assert words in str(refused.value) and str(refused.value) in outcome.out and outcome.code == 1
    assert edgefl_train("data", f"{specs[0]}@site=east", f"{specs[1]}@site=west").code == 0
