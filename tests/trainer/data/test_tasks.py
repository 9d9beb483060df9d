"""`--task`: classes as they are, nevus against the rest, or gathered by a person (docs/reference/data.md)."""

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from tests.trainer.data.conftest import png, ward_records

from edgefl_protocol.pictures.class_info import KNOWN, known_among
from edgefl_trainer.data import DataError, Federation, load_federation
from edgefl_trainer.data.class_numbers import in_classes
from edgefl_trainer.data.errors import TaskError
from edgefl_trainer.data.partitions.make import make_partition
from edgefl_trainer.data.partitions.partition import PARTITION_FILE, read_partition
from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.data.site_rows import ROW_KINDS
from edgefl_trainer.data.tasks import near_classes, parse_groups, task_word
from edgefl_trainer.engine.judging.own_data import own_data
from edgefl_trainer.engine.settings import RunSettings

WORD = re.compile(r"[a-z0-9-]{1,32}")  # docs/design.md 7: of a bundle's line and task


@pytest.fixture
def ward(make_zip, cache) -> str:
    """Three sites with NV, MEL and BKL."""
    return f"manifest:{make_zip(ward_records())}"


def load(spec: str, task: str, **changes) -> Federation:
    return load_federation([spec], image_px=8, task=task, **changes)


def called(federation: Federation) -> Counter[str]:
    """Images of each class among all rows of all sites."""
    rows = np.concatenate([site.rows(kind) for site in federation.sites.values() for kind in ROW_KINDS])
    return Counter(federation.classes[federation.labels[row]] for row in rows)


def test_nevus_is_a_group_like_any_other(ward):
    """docs/reference/data.md: the same labels, the same rows of every kind, the same digest."""
    one, other = load(ward, "nevus"), load(ward, "nevus=NV:other")
    assert one.classes == other.classes == ("nevus", "other")
    assert one.labels.tobytes() == other.labels.tobytes()
    assert one.partition_sha256 == other.partition_sha256
    for name, site in one.sites.items():
        assert all(np.array_equal(site.rows(kind), other.sites[name].rows(kind)) for kind in ROW_KINDS)


def test_classes_are_gathered_as_written(ward):
    """Counted from the manifest: what is not named is the rest, which comes last; groups keep their order."""
    counted = Counter(record["label"] for record in ward_records())
    found = load(ward, "mal=MEL,BKL:rest")
    assert found.classes == ("mal", "rest")
    assert called(found) == {"mal": counted["MEL"] + counted["BKL"], "rest": counted["NV"]}
    several = load(ward, " dark = MEL : mole=NV : rest ")
    assert several.classes == ("dark", "mole", "rest")
    assert called(several) == {"dark": counted["MEL"], "mole": counted["NV"], "rest": counted["BKL"]}


def test_the_rows_are_those_of_every_other_task(ward):
    """Which image learns, tunes and tests is by lesion and seed alone."""
    found, plain = load(ward, "dark=MEL:rest", seed=3), load(ward, "all", seed=3)
    for name, site in plain.sites.items():
        assert all(np.array_equal(site.rows(kind), found.sites[name].rows(kind)) for kind in ROW_KINDS)


def test_only_chosen_classes_are_gathered(ward):
    found = load(ward, "dark=MEL:rest", classes=["MEL", "BKL"])
    assert called(found).keys() == {"dark", "rest"}
    counted = Counter(record["label"] for record in ward_records())
    assert called(found)["rest"] == counted["BKL"]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("nevis", "Task 'nevis' is not known; allowed: all, nevus, or NAME=A,B:REST"),
        ("mal=MEL,BCC", "is not known; allowed: all, nevus, or NAME=A,B:REST"),
        ("mal=MEL:", "has no name for every other class after its last colon"),
        ("mal=MEL:x=BCC", "has no name for every other class after its last colon"),
        (":rest", "has the group '', which is not of the form NAME=A,B"),
        ("MEL:rest", "has the group 'MEL', which is not of the form NAME=A,B"),
        ("mal=:rest", "has the group 'mal=', which is not of the form NAME=A,B"),
        ("mal=MEL,,BCC:rest", "which is not of the form NAME=A,B"),
        ("=MEL:rest", "which is not of the form NAME=A,B"),
        ("mal=MEL,MEL:rest", "names the class 'MEL' twice: name it once"),
        ("mal=MEL:pre=AK,MEL:rest", "names the class 'MEL' twice: name it once"),
        ("mal=MEL:mal=BCC:rest", "has two groups called 'mal'"),
        ("mal=MEL:mal", "names the group 'mal' twice"),
    ],
)
def test_what_is_no_task_is_one_sentence(task, words):
    with pytest.raises(TaskError) as refused:
        parse_groups(task)
    assert words in str(refused.value) and refused.value.code == "setting"


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("mal=MELL:rest", "names the class 'MELL', which the data does not have; did you mean MEL?"),
        ("mal=mel:rest", "names 'mel' and the data has 'MEL': write it as the data does, or name both"),
        ("a=NV,MEL:b=BKL:rest", "leaves no class of the data for 'rest'"),
    ],
)
def test_what_the_data_cannot_give_is_one_sentence(ward, task, words):
    with pytest.raises(DataError) as refused:
        load(ward, task)
    assert words in str(refused.value)


def test_a_class_that_two_sources_write_differently_is_never_left_out_in_silence(make_zip, cache):
    """A melanoma written `mel` would be taught as harmless by a task that names `MEL`."""
    records = ward_records()
    for record in records:
        if record["center"] == "west":
            record["label"] = record["label"].lower()
    spec = f"manifest:{make_zip(records)}"
    with pytest.raises(DataError, match="names 'MEL' and the data has 'mel': write it as the data does, or name both"):
        load(spec, "mal=MEL:rest")
    counted = Counter(record["label"] for record in records)
    assert called(load(spec, "mal=MEL,mel:rest"))["mal"] == counted["MEL"] + counted["mel"]


@pytest.mark.parametrize(
    ("task", "new", "whole", "words"),
    [
        (
            "mal=MEL,BKL:rest",
            "Melanoma",
            True,
            "counts 'MEL' to 'mal' and 'Melanoma' to 'rest', but they look like one",
        ),
        ("mal=MEL:x=Melanoma:rest", "Melanoma", True, "counts 'MEL' to 'mal' and 'Melanoma' to 'x'"),
        ("mal=MEL,BKL:rest", "M el", False, "counts 'MEL' to 'mal' and 'M el' to 'rest'"),
        ("nevus", "N V", True, "counts 'N V' to 'other' and 'NV' to 'nevus'"),
    ],
)
@pytest.mark.parametrize("sites", [("west",), ("east", "north", "west")])
def test_a_class_under_two_names_is_never_in_two_groups(make_zip, cache, task, new, whole, words, sites):
    """Half of the melanomas were taught as rest; a clinic that writes all of its own otherwise has no other MEL."""
    records = ward_records()
    for record in records:
        if record["center"] in sites and record["label"][0] == new[0]:
            record["label"] = new
    if len(sites) == 3 and whole:
        records += ward_records(sites=("south",))
    with pytest.raises(DataError, match=re.escape(words)):
        load(f"manifest:{make_zip(records)}", task, whole_task=whole)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("NV", "Melanocytic nevi"),  # HAM10000's names as its paper and its users write them
        ("NV", "Melanocytic naevi"),  # ICD-10 D22
        ("MEL", "Malignant melanoma"),  # ICD-10 C43
        ("BCC", "Basal cell carcinomas"),
        ("AK", "Actinic keratoses"),
        ("AK", "Solar keratosis"),
        ("BKL", "Benign keratosis-like lesions"),
        ("akiec", "Actinic keratoses and intraepithelial carcinoma"),
        ("DF", "Dermatofibromas"),
        ("VASC", "Vascular lesions"),
        ("nävi", "navi"),
    ],
)
def test_a_long_name_is_known_for_its_short_one(short, long):
    assert len(list(near_classes({short: 1, long: 1}))) == 1
    assert not list(near_classes({long: 1, "Lichen planus": 1}))


def test_a_nevus_by_its_long_name_is_one(make_zip, cache):
    """HAM10000's "Melanocytic nevi" counted as `other`, and `rest` held "Malignant melanoma"."""
    records = ward_records()
    for record in records:
        names = {"NV": "Melanocytic nevi", "MEL": "Malignant melanoma"}
        record["label"] = names.get(record["label"], record["label"]) if record["center"] == "west" else record["label"]
    spec = f"manifest:{make_zip(records)}"
    nevi = sum(record["label"] in ("NV", "Melanocytic nevi") for record in records)
    assert called(load(spec, "nevus"))["nevus"] == nevi
    with pytest.raises(DataError, match="counts 'MEL' to 'mal' and 'Malignant melanoma' to 'rest'"):
        load(spec, "mal=MEL:rest")


def test_a_class_in_two_forms_of_unicode_is_one(make_zip, cache, tmp_path):
    """Unicode 15.1, annex 15: é may be one code point (NFC) or two (NFD, as macOS names folders); both look alike."""
    one, two = "l\u00e9sion", "le\u0301sion"
    records = ward_records(4)
    for number, record in enumerate(records):
        record["label"] = (one, two, "NV")[number % 3]
    spec = f"manifest:{make_zip(records)}"
    assert load(spec, "all").classes == ("NV", one)
    assert load(spec, f"a={two}:rest").classes == ("a", "rest")
    assert load(spec, "all", classes=[two, "NV"]).classes == (one, "NV")
    for number, label in enumerate((one, two, "NV", "NV")):
        path = tmp_path / "w" / ("east", "west")[number % 2] / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    assert load(f"folder:{tmp_path / 'w'}", "all").classes == ("NV", one)


def test_what_an_earlier_version_kept_in_another_form_of_unicode_is_known(make_zip, tmp_path, monkeypatch):
    """It took names as the data writes them: the run's classes, its partition and its digest are in NFD."""
    one, two = "l\u00e9sion", "le\u0301sion"
    records = [{**record, "label": record["label"].replace("MEL", two)} for record in ward_records(12)]
    spec, plan = f"manifest:{make_zip(records)}", PartitionPlan(scheme="iid", sites=2)
    with monkeypatch.context() as earlier:
        for module in ("federation", "sources.manifest", "partitions.place"):
            earlier.setattr(f"edgefl_trainer.data.{module}.class_name", str)
        (tmp_path / PARTITION_FILE).write_bytes(make_partition([spec], plan, 0).to_bytes())
        dealt = read_partition(tmp_path / PARTITION_FILE)
        kept = load_federation([spec], image_px=8, partition=dealt)
    assert two in kept.classes and one not in kept.classes
    run = SimpleNamespace(
        folder=tmp_path,
        settings=RunSettings(method="head", data=(spec,), backbone="tiny", image_px=8, preset="tiny"),
        backbone=SimpleNamespace(spec=SimpleNamespace(image_px=8)),
        classes=kept.classes,
        questions=None,
        summary={"partition_sha256": kept.partition_sha256},
    )
    found = own_data(run)
    assert found.classes == kept.classes and found.partition_sha256 == kept.partition_sha256
    assert np.array_equal(found.labels, kept.labels)
    for name in (one, two):
        some = load_federation([spec], image_px=8, partition=dealt, classes=[name, "NV"])
        assert some.classes == (one, "NV")
    both = in_classes(load(spec, "all"), ("NV", two, "BKL", one), whose="the run", advice="none")
    assert called(both)[one] == sum(record["label"] == two for record in records)
    with pytest.raises(DataError, match="the data has the class 'BKL', but the run's classes are"):
        in_classes(load(spec, "all"), ("NV", two), whose="the run", advice="none")


def test_a_class_under_two_names_in_one_group_is_warned_of(make_zip, cache):
    """As without a task; they were looked for among the names of the groups."""
    records = ward_records()
    for record in records:
        if record["center"] == "west" and record["label"] == "MEL":
            record["label"] = "Melanoma"
    spec = f"manifest:{make_zip(records)}"
    warned = [
        [line for line in load(spec, task).warnings if "look like one" in line]
        for task in ("all", "mal=MEL,Melanoma:rest", "mole=NV:rest", "nevus")
    ]
    assert len(warned[0]) == 1 and warned[0] == warned[1] == warned[2] and warned[3] == []


def test_data_to_judge_on_may_lack_a_class_but_not_all(ward):
    found = load(ward, "mal=MEL,SCC:rest", whole_task=False)
    assert found.classes == ("mal", "rest") and called(found)["mal"] == called(load(ward, "mal=MEL:rest"))["mal"]
    with pytest.raises(DataError, match="names the class 'SCC', which the data does not have"):
        load(ward, "mal=SCC:rest", whole_task=False)


# What a device tells a clinician of a class it takes by the class's name (`pictures.class_info`): a name that is
# described there stands for nothing else, so that nothing that holds a cancer is ever called benign.


@pytest.mark.parametrize(
    "task",
    [
        "nevus=MEL:rest",
        "nevus=NV,MEL:rest",
        "BKL=MEL,BCC:rest",
        "nv=BKL:rest",
        "MEL=MEL,BCC:rest",
        "mal=MEL:NV",
        "mal=MEL,BCC:other",  # known as what is no nevus; here nevi are among it
        "nevus=NV:mal=MEL:other",
    ],
)
def test_no_name_says_something_else_than_what_it_stands_for(task):
    with pytest.raises(TaskError, match="which a clinician reads as"):
        parse_groups(task)


@pytest.mark.parametrize(
    "task", ["nevus=NV:other", "nevus=nevi,Naevus:other", "NV=nv:rest", "mel=MEL:bcc=BCC,bcc:rest"]
)
def test_a_name_that_says_what_it_stands_for_is_kept(task):
    groups = parse_groups(task)
    assert groups is not None
    assert all(KNOWN[name].suspicious for name in groups.classes if name in KNOWN and name not in ("nevus", "NV"))


def test_what_nobody_describes_asks_for_a_look():
    """docs/decisions/0039: a class of unknown meaning is suspicious, whatever a person calls it."""
    groups = parse_groups("harmless=NV,BKL:rest")
    assert groups is not None and known_among(groups.classes) == {}


@pytest.mark.parametrize(("task", "name"), [("red=blue:rest", "red"), ("a=blue:red", "red")])
def test_nothing_takes_the_name_of_another_class_of_the_data(make_zip, cache, task, name):
    """`red` would hold what the data calls `blue`, or `green` beside it."""
    records = ward_records()
    for record in records:
        record["label"] = {"NV": "red", "MEL": "blue", "BKL": "green"}[record["label"]]
    spec = f"manifest:{make_zip(records)}"
    with pytest.raises(DataError, match=f"uses the name {name!r} for a group"):
        load(spec, task)
    assert load(spec, "a=blue:red", classes=["blue", "red"]).classes == ("a", "red")  # nothing else is left


@pytest.mark.parametrize(
    ("task", "word"),
    [
        ("all", "all"),
        ("nevus", "nevus"),
        ("mal=MEL,BCC:rest", "mal-rest"),
        ("Böse=MEL:Übrige Klassen", "b-se-brige-klassen"),
        (f"{'long' * 20}=MEL:rest", ("long" * 20)[:32]),
        ("ß=MEL:ß2", "2"),
        ("ß=MEL:é", "groups"),
    ],
)
def test_a_bundles_word_for_a_task(task, word):
    assert task_word(task) == word and WORD.fullmatch(word)
