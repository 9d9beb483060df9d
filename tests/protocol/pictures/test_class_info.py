"""What classes mean: the product's table, and class information in `labels.json` and `card.json`.

Sources: docs/reference/scores.md, "What a class means"; for the facts, WHO Classification of Skin Tumours, 4th edition
(2018), and Tschandl et al. 2018 (HAM10000), table 1.
"""

import json

import pytest

from edgefl_protocol.bundle.model_card import Card, Labels, referral_rules
from edgefl_protocol.pictures.class_info import KNOWN, MAX_MEANING, ClassInfo, known_among, suspicious_classes
from edgefl_protocol.pictures.suspicious import Suspicion

FACTS = {
    "malignant": {"MEL", "BCC", "SCC", "mel", "bcc"},
    "premalignant": {"AK", "akiec"},
    "benign": {"NV", "BKL", "DF", "VASC", "nv", "bkl", "df", "vasc", "nevus"},
    "unknown": {"other"},
}
ISIC = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CARD = Card(
    intended_use="tests", method="fedevprompt", site="one", sites={"one": 10}, metrics={}, temperature=1.0,
    refer_above=0.6, backbone="none", licence_note="none",
)  # fmt: skip
CHOSEN = Suspicion(
    threshold=0.25, sensitivity=0.96, specificity=0.5, suspicious=25, benign=40, statement="chosen by a test"
)


def test_every_label_of_the_table_has_its_malignancy() -> None:
    assert {label: info.malignancy for label, info in KNOWN.items()} == {
        label: kind for kind, labels in FACTS.items() for label in labels
    }
    assert set(ISIC) | {"akiec", "bcc", "bkl", "df", "mel", "nv", "vasc", "nevus", "other"} == set(KNOWN)


def test_only_benign_classes_do_not_ask() -> None:
    """A class that nobody described is unknown, and a given one goes before the table."""
    given_one = {"NV": ClassInfo("Spitz nevus", "A mole.", "unknown")}
    assert suspicious_classes(ISIC, known_among(ISIC)) == tuple(
        label in FACTS["malignant"] | FACTS["premalignant"] for label in ISIC
    )
    assert suspicious_classes(("NV", "wart"), known_among(("NV", "wart"))) == (False, True)
    assert suspicious_classes(("NV",), known_among(("NV",), given_one)) == (True,)


@pytest.mark.parametrize(
    ("name", "meaning", "malignancy"),
    [
        ("", "x", "benign"), ("x" * 201, "x", "benign"), ("two\nlines", "x", "benign"), (" x", "x", "benign"),
        ("x", "", "benign"), ("x", "y" * (MAX_MEANING + 1), "benign"), ("x", "\x1b[2J", "benign"),
        ("x", "y", "harmless"), ("x", "y", "Benign"), (3, "y", "benign"), ("x", None, "benign"), ("x", "y", ["benign"]),
    ],
)  # fmt: skip
def test_class_info_out_of_form_is_refused(name, meaning, malignancy) -> None:
    with pytest.raises(ValueError, match="must"):
        ClassInfo(name, meaning, malignancy)


def test_labels_and_card_come_back_as_they_were_written() -> None:
    labels = Labels(ISIC, (True,) * 8, known_among(ISIC))
    card = Card(**{**vars(CARD), "suspicion": CHOSEN})
    assert Labels.from_bytes(labels.to_bytes()) == labels
    assert Card.from_bytes(card.to_bytes()) == card


def test_what_was_written_before_is_read_and_written_as_before() -> None:
    """docs/design.md 7: a bundle from before class information has neither key, and keeps its bytes."""
    labels = b'{"classes":["MEL","NV"],"seen":[true,true]}'
    found = Labels.from_bytes(labels)
    assert (found.info, found.suspicious) == (None, None)
    assert json.loads(found.to_bytes()) == json.loads(labels)
    assert "suspicion" not in json.loads(CARD.to_bytes())
    assert Card.from_bytes(CARD.to_bytes()).suspicion is None


INFO = {"name": "Melanoma", "meaning": "A cancer.", "malignancy": "malignant"}


@pytest.mark.parametrize(
    "info",
    [
        None, [], "MEL", {"MEL": None}, {"MEL": {}}, {"MEL": {**INFO, "more": 1}}, {"MEL": {**INFO, "malignancy": 1}},
        {"other": INFO}, {"MEL": {**INFO, "name": "x" * 201}}, {"MEL": {**INFO, "meaning": ""}},
    ],
)  # fmt: skip
def test_labels_with_other_info_are_refused(info) -> None:
    data = json.dumps({"classes": ["MEL", "NV"], "seen": [True, True], "info": info}).encode()
    with pytest.raises(ValueError, match=r"info|must be"):
        Labels.from_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 1.5}, {"threshold": -0.1}, {"threshold": True}, {"threshold": "0.5"}, {"sensitivity": 2},
        {"specificity": "x"}, {"suspicious": -1}, {"suspicious": 1.5}, {"benign": True}, {"benign": 2**40},
        {"statement": ""}, {"statement": "x" * 1001}, {"statement": None}, {"more": 1},
    ],
)  # fmt: skip
def test_a_card_with_another_suspicion_is_refused(change) -> None:
    record = json.loads(Card(**{**vars(CARD), "suspicion": CHOSEN}).to_bytes())
    record["suspicion"] |= change
    with pytest.raises(ValueError, match=r"must|not known"):
        Card.from_bytes(json.dumps(record).encode())


def test_the_rules_of_a_bundle() -> None:
    """One function makes them of labels and card: what is not stated is not in force, and no `info` asks always."""
    labels = Labels(("MEL", "NV"), (True, True), known_among(("MEL", "NV")))
    rules = referral_rules(labels, Card(**{**vars(CARD), "suspicion": CHOSEN}))
    assert (rules.suspicious, rules.suspicious_from, rules.uncertain_above) == ((True, False), 0.25, 0.6)
    assert referral_rules(labels, CARD, 0.3).suspicious_from is None
    assert referral_rules(Labels(("MEL", "NV"), (True, True)), CARD).suspicious is None
