"""Settings: read once, checked whole (docs/security.md, decisions)."""

import tomllib

import pytest
import tomli_w

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.founding.task import reply_cap
from edgefl_coordinator.settings import CoordinatorHome, load_settings, settings_from_table, settings_to_table
from edgefl_trainer.methods import METHODS


def test_there_and_back(tools) -> None:
    """What `init` writes is what `serve` reads."""
    settings = settings_from_table(tools.settings_table(limits={"header_deadline_s": 2, "body_deadline_s": 0.5}))
    again = settings_from_table(tomllib.loads(tomli_w.dumps(settings_to_table(settings))))
    assert again == settings
    assert settings.task.tokens == 4


# fmt: off
WRONG = [
    ({"colour": "red"},                              "unknown setting colour"),
    ({"rounds": {"quorom": 3}},                      r"setting rounds\.quorom; known: allow_small_cohort, count"),
    ({"federation": "Skin Clinic"},                  "lower-case"),
    ({"public_url": "http://127.0.0.1"},             "https://"),
    ({"public_url": "https://[::1"},                 "write it as https://HOST or https://HOST:PORT"),
    ({"public_url": "https://fl.example.org:99999"}, "has no host and port that can be read"),
    ({"public_url": "https://"},                     "has no host and port that can be read"),
    ({"database": "postgresql://[::1/x"},            "write it as postgresql://USER@HOST/NAME"),
    ({"port": 70_000},                               "port is 70000; it must be a whole number of at most 65535"),
    ({"port": True},                                 "port is True; it must be a whole number"),
    ({"suite": 3},                                   "suite is 3; allowed: 1, 2"),
    ({"rounds": {"quorum_min": 5}},                  r"rounds.quorum_min \(5\) must not be above rounds.quorum_"),
    ({"rounds": {"quorum_min": 0}},                  "rounds.quorum_min is 0; it must be a whole number of at least 1"),
    ({"rounds": {"deadline_s": 0}},                  "rounds.deadline_s is 0; it must be a whole number of at least 1"),
    ({"rounds": {"count": 0}},                       "rounds.count is 0; it must be a whole number of at least 1"),
    ({"rounds": {"start": "whenever"}},              "start is 'whenever'; allowed: automatic, manual"),
    ({"rounds": {"min_cohort": 1}},                  "told apart"),
    ({"limits": {"body_bytes": 64 * 2**20}},         "33554432"),
    ({"limits": {"body_deadline_s": 0}},             r"limits\.body_deadline_s is 0; it must be a number above 0"),
    ({"task": {"classes": ["nevus"]}},               "at least two names"),
    ({"task": {"classes": ["nevus", "nevus"]}},      "at least two names"),
    ({"task": {"method": "../fedevprompt"}},         "neither a method"),
    ({"task": {"backbone": {"image_px": 25, "patch": 12}}}, "multiple of patch"),
    ({"task": {"backbone": {"image_px": 72}}},       "multiple of patch"),
    ({"task": {"backbone": {"image_px": 72, "architecture": "resnet18"}}}, "shares_maps = false"),
    ({"task": {"backbone": {"architecture": "resnet18"}, "shares_maps": False}}, "image_px"),
    ({"task": {"settings": {"sent_maps": "median"}}}, "sent_maps must be each or mean"),
    ({"task": {"max_samples": 0}},                   "task.max_samples is 0; it must be a whole number of at least 1"),
    ({"task": {"classes": "nevus"}},                 "task.classes is 'nevus'; it must be a list"),
    ({"task": {"classes": ["nevus", 2]}},            r"task.classes is \['nevus', 2\]; it must be text"),
    ({"task": {"settings": 5}},                      "task.settings is 5; it must be a table"),
    ({"limits": {"reply_bytes": 2**30 + 1}},         "1073741824"),
    ({"limits": {"reply_bytes": 2**24, "body_bytes": 2**24}}, "limits.body_bytes"),
    ({"limits": {"reply_bytes": 2**26, "body_bytes": 2**24}}, "limits.body_bytes"),
    ({"limits": {"open_blobs": 0}},                  "open_blobs is 0; it must be a whole number of at least 1"),
    ({"limits": {"blob_age_s": 0}},                  "blob_age_s is 0; it must be a whole number of at least 1"),
]
# fmt: on


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_wrong_settings(tools, change, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings_from_table(tools.settings_table(**change))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_of_the_table_can_be_named(tools, method) -> None:
    """Names have hyphens, too: p-pt, fedvpt-deep."""
    assert settings_from_table(tools.settings_table(task={"method": method})).task.method == method


def test_a_convolutional_network(tools) -> None:
    """A federation of whole networks: no patches, no maps, and replies above one envelope's cap."""
    task = {"method": "fedclf", "shares_maps": False, "backbone": {"image_px": 72, "architecture": "resnet18"}}
    settings = settings_from_table(tools.settings_table(task=task, limits={"reply_bytes": 100 * 2**20}))
    assert settings.task.tokens == 0
    again = settings_from_table(tomllib.loads(tomli_w.dumps(settings_to_table(settings))))
    assert again == settings


def test_the_cap_of_replies_follows_the_network() -> None:
    """docs/security.md 2.2: the signed task states the cap. A network, its momentum encoder and the largest bank fit
    (docs/methods.md 2.2), within the blobs' own."""
    assert reply_cap(1000) == 17 * 2**20
    for network in (8 * 2**20, 46_070_080, 97_000_000):
        assert 2 * network + 65_536 * 128 * 2 <= reply_cap(network) <= 2 * network + 17 * 2**20
    assert reply_cap(2**30) == 2**30


def test_missing_parts(tools) -> None:
    table = tools.settings_table()
    for name in ("federation", "task", "rounds"):
        with pytest.raises(ValueError, match=f"the setting {name} is missing"):
            settings_from_table({key: value for key, value in table.items() if key != name})


def test_no_home_says_what_to_do(tmp_path) -> None:
    with pytest.raises(OperatorError, match="edgefl-coordinator init"):
        load_settings(CoordinatorHome(tmp_path))


def test_broken_toml_is_one_sentence(tmp_path) -> None:
    (tmp_path / "config.toml").write_text("federation = ")
    with pytest.raises(OperatorError, match=r"config\.toml"):
        load_settings(CoordinatorHome(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("deadline_s = 60\n", "deadline_s = -5\n", ": rounds.deadline_s is -5; it must be"),
        ("deadline_s = 60\n", "deadlines = 60\n", ": unknown setting rounds.deadlines; known: "),
        ("quorum_min = 2", "quorum_min = 9", ": rounds.quorum_min (9) must not be above"),
        ('federation = "skin"', 'federation = "Skin"', ": federation 'Skin' must be"),
        ("deadline_s = 60\n", "deadline_s = \n", "(at line "),
    ],
)
def test_a_wrong_setting_is_named_with_its_line(make_coordinator, old, new, told) -> None:
    """Whoever edits the file finds the line; a setting of the same name elsewhere is not meant."""
    coordinator = make_coordinator()
    coordinator.store.close()
    config = coordinator.store.home.config
    text = config.read_text()
    assert text.count(old) == 1
    config.write_text(text.replace(old, new))
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(OperatorError) as refused:
        load_settings(coordinator.store.home)
    assert told in str(refused.value) and f"line {line}" in str(refused.value), str(refused.value)
