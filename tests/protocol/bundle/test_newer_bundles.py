"""What an older edgefl says to a bundle that a newer one built: update it. Nobody is sent to build a bundle again.

A signer's own version checks what it builds (`build_bundle`), so a signed record that has more than is known here was
made by a newer version. Source: docs/design.md 5 (a known failure says what to do).
"""

import json

import pytest

from edgefl_protocol.bundle.manifest import CLIENT_VERSION
from edgefl_protocol.errors import BundleError

RECORDS = ("preprocess", "labels", "card")


def refused(good, data: bytes) -> BundleError:
    with pytest.raises(BundleError) as caught:
        good.load(data)
    return caught.value


def changed(good, name: str, **values) -> bytes:
    """The bundle with other values in one of its records, signed by the same key; None takes a key out."""
    record = json.loads(good.members[name]) | values
    kept = {key: value for key, value in record.items() if value is not None}
    return good.resign({name: json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()})


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_with_a_new_key_asks_for_an_update(good, name):
    error = refused(good, changed(good, f"{name}.json", calibration=[1]))
    assert str(error) == (
        f"{name}.json is refused: has calibration, which is not known here; update edgefl-derm, this is "
        f"{CLIENT_VERSION}"
    )
    assert error.code == f"bad_{name}"


def test_a_new_key_inside_a_record_does_too(good):
    found = {"name": "Melanoma", "meaning": "A cancer.", "malignancy": "malignant", "icd": "C43"}
    label = json.loads(good.members["labels.json"])["classes"][0]
    told = str(refused(good, changed(good, "labels.json", info={label: found})))
    assert "info of a class has icd, which is not known here; update edgefl-derm" in told


def test_a_new_key_of_the_manifest_does_too(good):
    text = json.loads(good.manifest.to_bytes()) | {"region": "eu"}
    data = good.resign({}, json.dumps(text, sort_keys=True, separators=(",", ":")).encode())
    told = str(refused(good, data))
    assert "has region, which is not known here; update edgefl-derm" in told and "publisher" not in told


def test_a_new_member_does_too(good):
    told = str(refused(good, good.resign({"calibration.json": b"{}"})))
    assert f"unknown: calibration.json; update edgefl-derm, this is {CLIENT_VERSION}" in told


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_lacks_a_key_is_built_again(good, name):
    """An older or foreign builder made it: no update of the device helps."""
    first = sorted(json.loads(good.members[f"{name}.json"]))[0]
    told = str(refused(good, changed(good, f"{name}.json", **{first: None})))
    assert "must hold exactly" in told and "build the bundle again" in told


def test_a_value_of_unknown_meaning_names_both_ways(good):
    told = str(refused(good, changed(good, "preprocess.json", fit="stretch")))
    assert "build the bundle again, or update edgefl-derm" in told
