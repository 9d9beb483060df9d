"""`isic2019:DIR`: the official ISIC 2019 files plus the HAM10000 metadata, as the six centres of Fed-ISIC2019.

Built as FLamby builds it (docs/methods.md 7.1): the first four characters of the lesion id give the source, the
HAM10000 metadata its four centres. Differs from FLamby: it drops images without `lesion_id`, here they belong to no
site and have no label, for self-supervised learning only; the default split is by lesion (its own shows 696 HAM
lesions on both sides, docs/methods.md 7.2); `split=flamby` takes FLamby's file as it is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from edgefl_trainer.data.errors import DataError, SpecError
from edgefl_trainer.data.rows import UNDEALT, Row, SourceRows
from edgefl_trainer.data.sources.files import file_pixels
from edgefl_trainer.data.sources.store import FileStore, open_store, pictures_by_name
from edgefl_trainer.data.sources.tables import read_table

CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias")  # FLamby's numbers 0..5
LESION_SPLITS = ("lesion", "flamby")

_GROUND_TRUTH = ("ISIC_2019_Training_GroundTruth.csv",)
_METADATA = ("ISIC_2019_Training_Metadata.csv",)
_HAM = ("HAM10000_metadata.csv", "HAM10000_metadata")
_FLAMBY = ("train_test_split.csv", "train_test_split", "flamby_fed_isic2019_train_test_split.csv")
_IMAGES = "ISIC_2019_Training_Input"
_PREFIXES = {"BCN_": "bcn", "MSK4": "msk"}


def read_isic2019(path: Path, split: str) -> SourceRows:
    """Read the tables and the pictures, which lie anywhere below a folder or in a zip.

    Args:
        split: `lesion`: a quarter of each centre's lesions is dealt to test; `flamby`: FLamby's published split.

    Raises:
        DataError: A table or picture is missing, or a row cannot be placed.
    """
    store = open_store(path)
    rows = isic_rows(store, split)
    return SourceRows(f"isic2019:{path}", rows, file_pixels(store, rows))


def isic_rows(store: FileStore, split: str) -> tuple[Row, ...]:
    """Return the rows of the tables alone, in the order of the metadata; pictures are located but not required.

    Images without a lesion id are unlabelled ones of no site; where not one of their pictures is there, as in FLamby's
    own folder, they are left out. Raises as `read_isic2019`.
    """
    if split not in LESION_SPLITS:
        raise SpecError(f"Split {split!r} is not known for isic2019:; allowed: {', '.join(LESION_SPLITS)}.")
    names = store.names()
    labels = _labels(store, names)
    centre_of_ham = _ham_centres(store, names)
    folds = _flamby_folds(store, names) if split == "flamby" else {}
    find_picture = pictures_by_name(store, lambda name: PurePosixPath(name).stem, _IMAGES)
    table = read_table(store, _find(store, names, _METADATA), ("image", "lesion_id", "anatom_site_general"))
    rows = []
    given = split == "flamby"
    unplaced = any(not record["lesion_id"] and find_picture(record["image"]) for _, record in table.records)
    for line, record in table.records:
        image, lesion = record["image"], record["lesion_id"]
        if not lesion and not unplaced:
            continue
        where = f"{table.where} line {line}"
        if image not in labels:
            raise DataError(f"{where} names {image}, which the ground truth does not list.")
        site = _centre(image, lesion, centre_of_ham, where) if lesion else None
        rows.append(
            Row(
                image=image,
                source=find_picture(image) or f"{_IMAGES}/{image}.jpg",
                label=labels[image] if site else None,
                site=site,
                lesion=lesion or f"image:{image}",
                split="unlabelled" if site is None else _fold(image, site, folds, where) if given else UNDEALT,
                extra=(
                    ("age", record.get("age_approx", "")),
                    ("sex", record.get("sex", "")),
                    ("anatomy", record["anatom_site_general"]),
                ),
            )
        )
    return tuple(rows)


def _find(store: FileStore, names: Sequence[str], wanted: Sequence[str]) -> str:
    for name in names:
        if PurePosixPath(name).name in wanted:
            return name
    raise DataError(f"{store.name} lacks {wanted[0]}; put the official file there.")


def _labels(store: FileStore, names: Sequence[str]) -> dict[str, str]:
    table = read_table(store, _find(store, names, _GROUND_TRUTH), ("image", *CLASSES))
    labels = {}
    for line, record in table.records:
        chosen = [name for name in CLASSES if record[name] in ("1", "1.0")]
        if len(chosen) != 1:
            raise DataError(f"{table.where} line {line} marks {len(chosen)} of {', '.join(CLASSES)}; mark exactly one.")
        labels[record["image"]] = chosen[0]
    return labels


def _ham_centres(store: FileStore, names: Sequence[str]) -> dict[str, str]:
    table = read_table(store, _find(store, names, _HAM), ("image_id", "dataset"))
    for line, record in table.records:
        if record["dataset"] not in CENTRES:
            raise DataError(
                f"{table.where} line {line} has the dataset {record['dataset']!r}; known: {', '.join(CENTRES[1:])}."
            )
    return {record["image_id"]: record["dataset"] for _, record in table.records}


def _centre(image: str, lesion: str, centre_of_ham: Mapping[str, str], where: str) -> str:
    prefix = lesion[:4]
    if prefix in _PREFIXES:
        return _PREFIXES[prefix]
    if prefix != "HAM_":
        raise DataError(f"{where} has the lesion {lesion!r}; it must begin with BCN_, HAM_ or MSK4.")
    if image not in centre_of_ham:
        raise DataError(f"{where} names the HAM10000 image {image}, which the HAM10000 metadata lacks.")
    return centre_of_ham[image]


def _flamby_folds(store: FileStore, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Image → (centre number, train or test)."""
    table = read_table(store, _find(store, names, _FLAMBY), ("image", "center", "fold"))
    for line, record in table.records:
        if record["fold"] not in ("train", "test"):
            raise DataError(f"{table.where} line {line} has the fold {record['fold']!r}; allowed: train, test.")
    return {record["image"]: (record["center"], record["fold"]) for _, record in table.records}


def _fold(image: str, site: str, folds: Mapping[str, tuple[str, str]], where: str) -> str:
    if image not in folds:
        raise DataError(f"{where} names {image}, which FLamby's split lacks; use split=lesion or the full file.")
    number, fold = folds[image]
    if number != str(CENTRES.index(site)):
        raise DataError(
            f"{where} puts {image} at {site}, but FLamby's split puts it at centre {number}; use tables that match."
        )
    return fold
