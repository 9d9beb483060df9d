"""docs/methods.md 8.3 and the official layout: DOMAIN/CLASS/DOMAIN_CCC_NNNNNN.jpg; lines are `PATH NUMBER`."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.trainer.data.conftest import spoil

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.sources.domainnet import read_domainnet

# docs/methods.md 8.3
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
# The numbers of some classes in the official files, which count the 345 names in order.
NUMBERS = {"aircraft_carrier": 0, "bird": 22, "feather": 108, "headphones": 144, "ice_cream": 156, "teapot": 306} | {
    "tiger": 313, "whale": 335, "windmill": 338, "wine_glass": 340, "zebra": 343, "zigzag": 344,
}  # fmt: skip
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def write_domain(root: Path, domain: str, texts: Path) -> None:
    lines: dict[str, list[str]] = {"train": [], "test": []}
    for name, number in NUMBERS.items():
        (root / domain / name).mkdir(parents=True)
        for i in range(5):
            file = f"{domain}/{name}/{domain}_{number + 1:03d}_{i:06d}.jpg"
            pixels = np.random.default_rng([number, i, len(domain)]).integers(0, 256, (9, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / file)
            lines["test" if i == 4 else "train"].append(f"{file} {number}\n")
    for split, content in lines.items():
        (texts / f"{domain}_{split}.txt").write_text("".join(content))


@pytest.fixture
def net(tmp_path: Path) -> Path:
    root = tmp_path / "domainnet"
    root.mkdir()
    for domain in DOMAINS[:2]:
        write_domain(root, domain, root)
    return root


def test_domains_are_sites_and_the_ten_classes_are_read(net: Path, cache: Path) -> None:
    federation = load_federation([f"domainnet:{net}"], image_px=8)
    assert federation.classes == TEN
    assert list(federation.sites) == ["clipart", "infograph"]
    for domain, site in federation.sites.items():
        assert {kind: len(site.rows(kind)) for kind in ("train", "tune", "test")} == {
            "train": 34, "tune": 6, "test": 10,
        }  # fmt: skip
        for i in (*site.train, *site.tune, *site.test):
            where, label, _ = federation.names[i].split("/")
            assert (where, label) == (domain, federation.classes[federation.labels[i]])
        assert all(federation.names[i].endswith("_000004.jpg") for i in site.test)


def test_all_classes_on_request(net: Path) -> None:
    rows = read_domainnet(net, "all").rows
    assert Counter(row.label for row in rows) == dict.fromkeys(NUMBERS, 10)


def test_pictures_of_other_classes_need_not_be_there(net: Path) -> None:
    for path in (net / "clipart" / "zigzag").iterdir():
        path.unlink()
    assert len(read_domainnet(net, "ten").rows) == 100
    with pytest.raises(DataError, match=r"clipart_345_000000\.jpg is not in"):
        read_domainnet(net, "all")


def test_all_six_domains_and_split_files_in_their_own_folder(tmp_path: Path) -> None:
    (tmp_path / "splits").mkdir()
    for domain in DOMAINS:
        write_domain(tmp_path, domain, tmp_path / "splits")
    assert Counter(row.site for row in read_domainnet(tmp_path, "ten").rows) == dict.fromkeys(DOMAINS, 50)


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("clipart_test.txt", None, None, ["lacks clipart_test.txt"]),
        ("infograph_train.txt", None, None, ["lacks infograph_train.txt"]),
        ("clipart/bird/clipart_023_000002.jpg", None, None, ["clipart_023_000002.jpg is not in"]),
        ("clipart_train.txt", "clipart/zebra/", "sketch/zebra/", ["line 41", "clipart/CLASS/NAME.jpg NUMBER"]),
        ("clipart_train.txt", "clipart/zebra/", "zebra/", ["line 41"]),
        ("clipart_train.txt", "000000.jpg 22", "000000.jpg", ["line 5", "clipart/bird/"]),
        (
            "clipart_train.txt",
            "clipart/bird/clipart_023_000001.jpg 22",
            "clipart/../x 22",
            ["line 6", "'clipart/../x'"],
        ),
        ("clipart_train.txt", "000000.jpg 22", "000000.jpg 345", ["line 5", "bird", "345", "0 to 344"]),
        ("clipart_train.txt", "000000.jpg 22", "000000.jpg bird", ["line 5", "bird"]),
        ("infograph_test.txt", "000004.jpg 22", "000004.jpg 23", ["infograph_test.txt", "line 2", "bird", "23"]),
        ("clipart_test.txt", "bird/clipart_023_000004", "bird/clipart_023_000003", ["000003.jpg' twice"]),
    ],
)
def test_faults_are_named_in_one_sentence(
    net: Path, file: str, old: str | None, new: str | None, words: list[str]
) -> None:
    spoil(net / file, old, new)
    with pytest.raises(DataError) as caught:
        read_domainnet(net, "ten")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_empty_folder_and_an_unknown_choice_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no DOMAIN_train\.txt"):
        load_federation([f"domainnet:{tmp_path}"], image_px=8)
    with pytest.raises(DataError, match=r"classes=twenty.*ten, all"):
        load_federation([f"domainnet:{tmp_path},classes=twenty"], image_px=8)
