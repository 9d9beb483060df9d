"""`--class-info FILE.toml`. Source: docs/reference/scores.md, "What a class means"."""

from pathlib import Path

import pytest

from edgefl_protocol.pictures.class_info import ClassInfo
from edgefl_trainer.data import DataError
from edgefl_trainer.data.class_info import MAX_BYTES, called_harmless, read_class_info

CLASSES = ("MEL", "wart")
WART = '[wart]\nname = "Viral wart"\nmeaning = "A benign growth caused by a virus."\nmalignancy = "benign"\n'


def test_a_table_for_a_class_is_read(tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(WART)
    assert read_class_info(file, CLASSES) == {
        "wart": ClassInfo("Viral wart", "A benign growth caused by a virus.", "benign")
    }


def test_a_file_that_calls_a_cancer_benign_is_noticed() -> None:
    assert called_harmless({"MEL": ClassInfo("M", "m", "benign"), "wart": ClassInfo("W", "w", "benign")}) == ["MEL"]
    assert called_harmless({"MEL": ClassInfo("M", "m", "unknown"), "NV": ClassInfo("N", "n", "malignant")}) == []


BAD = {
    "no TOML": (b"[wart", "not TOML"),
    "no text": (b"\xff\xfe\x00", "not TOML"),
    "nested": (b"a=" + b"[" * 5000, "not TOML"),
    "an unknown class": (WART.replace("wart", "mole").encode(), "no class 'mole'"),
    "a plain value": (b"wart = 3", "must hold exactly name, meaning, malignancy"),
    "a key missing": (b'[wart]\nname = "x"\nmeaning = "y"\n', "must hold exactly"),
    "a key too many": ((WART + "more = 1\n").encode(), "must hold exactly"),
    "another malignancy": (WART.replace('"benign"', '"harmless"').encode(), "malignant, premalignant, benign, unknown"),
    "a number for a name": (WART.replace('"Viral wart"', "7").encode(), "name must be one printable line"),
    "a long meaning": (WART.replace("A benign", "A " * 300).encode(), "meaning must be one printable line"),
    "control characters": (WART.replace("Viral", "\\u001b[2J").encode(), "name must be one printable line"),
    "twice the same class": ((WART + WART).encode(), "not TOML"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_one_sentence(kind: str, tmp_path: Path) -> None:
    file, (data, words) = tmp_path / "classes.toml", BAD[kind]
    file.write_bytes(data)
    with pytest.raises(DataError, match="is refused") as refused:
        read_class_info(file, CLASSES)
    assert words in str(refused.value) and str(refused.value).endswith("correct the file")
    assert "\n" not in str(refused.value) and refused.value.code == "setting"


def test_a_file_that_is_not_there_or_too_large_is_told(tmp_path: Path) -> None:
    from edgefl_protocol.errors import StorageError

    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    for file in (tmp_path / "none.toml", large):
        with pytest.raises(StorageError):
            read_class_info(file, CLASSES)
