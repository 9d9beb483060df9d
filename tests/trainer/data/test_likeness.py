"""What the pictures are like that a run learns from: their longest side, and the quality of their JPEG."""

import csv
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.trainer.data.conftest import ward_records

from edgefl_protocol.pictures.preprocess import Preprocess, TaughtPictures, prepare
from edgefl_trainer.data import load_federation
from edgefl_trainer.data.sources.jpeg_quality import jpeg_quality


def picture(seed: int, px: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(60, 200, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((px, px), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **how: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def ward(tmp_path: Path, pictures: list[bytes], name: str = "ward.zip") -> str:
    """A zip of two sites whose pictures are these, again and again."""
    records = ward_records(4, ("east", "west"))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("index.csv", text.getvalue())
        for number, record in enumerate(records):
            archive.writestr(record["file"], pictures[number % len(pictures)])
    return f"manifest:{tmp_path / name}"


def jpegs(*sides: int, quality: int = 75) -> list[bytes]:
    return [encoded(picture(seed, px), quality=quality) for seed, px in enumerate(sides * 3)]


@pytest.mark.parametrize("quality", [1, 10, 30, 50, 75, 76, 92, 99])
def test_the_quality_of_a_jpeg_is_read_from_its_tables(quality: int) -> None:
    assert jpeg_quality(Image.open(io.BytesIO(encoded(picture(0, 40), quality=quality)))) == quality


def test_other_files_have_no_quality() -> None:
    tables = [[7] * 64, [9] * 64]
    for data in (
        encoded(picture(0, 40), "PNG"),
        encoded(picture(0, 40), quality=75, subsampling=0),  # colour at full resolution has other edges
        encoded(picture(0, 40), qtables=tables),
        encoded(picture(0, 40).convert("L"), quality=75),
    ):
        assert jpeg_quality(Image.open(io.BytesIO(data))) is None


@pytest.mark.parametrize(
    ("pictures", "image_px", "taught"),
    [
        (jpegs(24), 36, TaughtPictures(side=24, jpeg_quality=75)),
        (jpegs(24), 24, TaughtPictures(side=24, jpeg_quality=75)),  # nothing is shrunk, so its blocks are learned
        (jpegs(24, 30), 36, TaughtPictures(side=30, jpeg_quality=75)),
        (jpegs(24) + jpegs(24, quality=90), 36, TaughtPictures(side=24, jpeg_quality=90)),  # no more than any had
        ([*jpegs(24), encoded(picture(0, 24), "PNG")], 36, TaughtPictures(side=24)),
        ([encoded(picture(0, 24), "PNG")], 36, TaughtPictures(side=24)),
        ([encoded(picture(0, 24), "PNG")], 24, None),  # made like them, a photograph would be what it is anyway
        (jpegs(24, 40), 36, None),  # the network has seen what a camera's picture has
        (jpegs(48), 36, None),
    ],
)
def test_what_the_files_are_like(
    tmp_path: Path, cache: Path, pictures: list[bytes], image_px: int, taught: TaughtPictures | None
) -> None:
    found = load_federation([ward(tmp_path, pictures)], image_px=image_px)
    assert found.taught == taught
    told = [line for line in found.warnings if "a device makes each photograph as small first" in line]
    assert len(told) == (taught is not None and taught.side < image_px)


def test_only_what_is_learned_from_counts(tmp_path: Path, cache: Path) -> None:
    """Of two sites of seven pictures each, west's are large."""
    both = ward(tmp_path, [*jpegs(24, 24, 24)[:7], *jpegs(48, 48, 48)[:7]])
    assert load_federation([both], image_px=36).taught is None
    assert load_federation([f"{both}@site=west"], image_px=36).taught is None
    east = load_federation([f"{both}@site=east"], image_px=36)
    assert east.taught == TaughtPictures(side=24, jpeg_quality=75)
    judged = load_federation([f"{both}@site=east"], image_px=36, all_test=True)
    assert judged.taught is None, "nothing is learned from it"


def test_sites_of_two_sizes_are_told(tmp_path: Path, cache: Path) -> None:
    """A model that only learned at east gets sharper photographs; no rule of the run fits both."""
    both = ward(tmp_path, [*jpegs(24, 24, 24)[:7], *jpegs(48, 48, 48)[:7]])
    (told,) = [line for line in load_federation([both], image_px=36).warnings if "fewer pixels than the 36" in line]
    assert told.startswith("the pictures of east have fewer")


def test_larger_pictures_that_judge_are_made_like_the_taught_ones(tmp_path: Path, cache: Path) -> None:
    """Figures hold for what a device shows the network; what was learned stays as it was read."""
    records, large = ward_records(4, ("east", "west")), encoded(picture(5, 60), quality=95)
    small = jpegs(24)[0]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    splits = ["test" if number % 7 == 6 else "train" for number in range(len(records))]
    writer.writerows({**one, "split": split} for one, split in zip(records, splits, strict=True))
    with zipfile.ZipFile(tmp_path / "mixed.zip", "w") as archive:
        archive.writestr("index.csv", text.getvalue())
        for record, split in zip(records, splits, strict=True):
            archive.writestr(record["file"], large if split == "test" else small)
    found = load_federation([f"manifest:{tmp_path / 'mixed.zip'}"], image_px=36)
    taught = TaughtPictures(side=24, jpeg_quality=75)
    assert found.taught == taught
    for image, split in zip(found.images, splits, strict=True):
        by_hand = prepare(large if split == "test" else small, Preprocess(size=36, taught=taught))
        assert np.array_equal(image, by_hand)
    assert np.array_equal(found.images[0], prepare(small, Preprocess(size=36)))


def test_other_data_is_judged_as_a_device_sees_it(tmp_path: Path, cache: Path) -> None:
    """Each picture of 60 px, by hand: `prepare` of its file."""
    files = jpegs(60, quality=95)
    spec, taught = ward(tmp_path, files), TaughtPictures(side=24, jpeg_quality=75)
    found = load_federation([spec], image_px=36, made_like=taught)
    for number, image in enumerate(found.images):
        assert np.array_equal(image, prepare(files[number % 3], Preprocess(size=36, taught=taught)))
    plain = load_federation([spec], image_px=36)
    assert not np.array_equal(plain.images[0], found.images[0]), "the cache tells the two apart"


def test_drawn_pictures_have_their_size_and_no_compression(cache: Path) -> None:
    assert load_federation(["lesions:sites=2,images=8,px=48"], image_px=60).taught == TaughtPictures(side=48)
    assert load_federation(["lesions:sites=2,images=8,px=48"], image_px=48).taught is None
    assert load_federation(["lesions:sites=2,images=8,px=48"], image_px=36).taught is None
