"""Data SPECs: `KIND:BODY[,option=value…][@site=NAME|@split=iid:N|@split=test][@rows=TRAIN/TUNE/TEST]` → rows.

Kinds stand in `READERS`; the suffixes are kept with the table because they act after all SPECs were read.
Source: docs/design.md 5 (Data SPECs).
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl_trainer.data.dealing import Shares
from edgefl_trainer.data.errors import DataError, SpecError
from edgefl_trainer.data.lesions import OPTIONS, LesionSettings, parse_settings, read_lesions
from edgefl_trainer.data.rows import UNDEALT, Row, SourceRows
from edgefl_trainer.data.sources.cifar100 import read_cifar100
from edgefl_trainer.data.sources.domainnet import read_domainnet
from edgefl_trainer.data.sources.files import FilePixels
from edgefl_trainer.data.sources.folder import read_folder
from edgefl_trainer.data.sources.inat import OPTIONS as INAT_OPTIONS
from edgefl_trainer.data.sources.inat import read_inat
from edgefl_trainer.data.sources.isic2019 import read_isic2019
from edgefl_trainer.data.sources.manifest import read_manifest
from edgefl_trainer.data.sources.slake import read_slake
from edgefl_trainer.data.sources.tiny_imagenet import read_tiny_imagenet
from edgefl_trainer.data.sources.vqa_rad import read_vqa_rad

_SUFFIXES = ("site", "split", "rows")
_SUFFIX = re.compile(rf"@({'|'.join(_SUFFIXES)})=([^@]*)$")
_ANY_SUFFIX = re.compile(r"@([a-z]+)=([^@/]*)$")
_ROWS = re.compile(r"([1-9][0-9]?)/([1-9][0-9]?)/([1-9][0-9]?)")  # per cent of train, tune and test
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_SITES = 10_000


@dataclass(frozen=True, slots=True)
class Spec:
    """One parsed SPEC."""

    text: str  # as written
    kind: str  # A key of `READERS`
    body: str  # what follows the colon, without options and suffix
    options: Mapping[str, str]  # `name=value` pairs after the body
    site: str | None = None  # NAME of `@site=NAME`, or None
    iid_sites: int | None = None  # N of `@split=iid:N`, or None
    shares: Shares | None = None  # of `@rows=TRAIN/TUNE/TEST`, or None
    test_only: bool = False  # `@split=test`: test questions alone
    pictures: Path | None = None  # where the pictures of such a SPEC lie; None: in it


def parse_spec(text: str) -> Spec:
    """Parse one SPEC.

    Raises:
        SpecError: The kind, an option or a suffix is not known, or two suffixes exclude one another.
    """
    rest, suffixes = text, dict[str, str]()
    while suffix := _SUFFIX.search(rest):
        if suffix[1] in suffixes:
            raise SpecError(f"{text!r} has two suffixes @{suffix[1]}; write only one.")
        suffixes[suffix[1]] = suffix[2]
        rest = rest[: suffix.start()]
    if (other := _ANY_SUFFIX.search(rest)) and (near := difflib.get_close_matches(other[1], _SUFFIXES, 1)):
        raise SpecError(f"{text!r} has the unknown suffix @{other[1]}; did you mean @{near[0]}={other[2]}?")
    kind, colon, after = rest.partition(":")
    if not colon or kind not in READERS:
        raise SpecError(f"{text!r} is not a data SPEC; {_meant(text)}")
    body, options = _split_options(after)
    return _with_suffixes(Spec(text, kind, body, options), suffixes)


def read_spec(spec: Spec, seed: int, *, gaps: bool = False) -> SourceRows:
    """Read the rows of one SPEC, or raise a `DataError`; `seed` is the run's, for kinds that draw a split.

    With `gaps`, rows may name files that are missing, and be refused by a run (`SourceRows.refused`).
    """
    table = READERS[spec.kind](spec, seed)
    if table.refused and not gaps:
        raise DataError(table.refused[0])
    if isinstance(table.pixels, FilePixels) and not gaps and not table.asks:  # `questions.picture_tables` checks those
        table.pixels.check_present(len(table.rows))
    return table


def check_there(specs: Sequence[str]) -> None:
    """Refuse a SPEC whose path does not exist, or whose options `lesions:` does not have, before anything is read.

    A `DataError` as of `parse_spec` and `read_spec`.
    """
    for spec in map(parse_spec, specs):
        if spec.kind == "lesions":
            _lesion_settings(spec)
        elif spec.body and not Path(spec.body).expanduser().exists():
            read_spec(spec, 0)


def read_specs(specs: Sequence[Spec], seed: int, *, gaps: bool = False) -> list[SourceRows]:
    """Read the rows of several SPECs, see `read_spec`.

    The test questions of `@split=test` are about the pictures of the first SPEC of their kind, if there is one. What
    that one would hold out of questions that are not dealt, its site then learns from.
    """
    _check_test_questions(specs)
    tables: list[SourceRows] = []
    for place, spec in enumerate(specs):
        first = next((one for one in specs[:place] if one.kind == spec.kind), None) if spec.test_only else None
        if first is not None and first.iid_sites is not None:
            raise SpecError(f"{spec.text!r} has sites of its own, and {first.text!r} others: leave @split=iid out.")
        tables.append(read_spec(spec if first is None else replace(spec, pictures=_path(first)), seed, gaps=gaps))
    judged = {spec.kind for spec in specs if spec.test_only}
    return [
        replace(table, rows=tuple(_learned(row) for row in table.rows)) if spec.kind in judged else table
        for spec, table in zip(specs, tables, strict=True)
    ]


def _check_test_questions(specs: Sequence[Spec]) -> None:
    """Refuse, by a `SpecError`, SPECs that would judge the same test questions twice."""
    for place, spec in enumerate(specs):
        for other in specs[place + 1 :]:
            if (spec.kind, spec.body, spec.options) == (other.kind, other.body, other.options) and (
                spec.test_only or other.test_only
            ):
                raise SpecError(
                    f"{spec.text!r} and {other.text!r} read the same test questions; name them once: leave "
                    f"{(other if other.test_only else spec).text!r} out."
                )


def _learned(row: Row) -> Row:
    return replace(row, split="train") if row.split == UNDEALT else row


def asks_questions(text: str) -> bool:
    """Tell whether the rows of a SPEC ask questions about their pictures, by its kind alone."""
    return text.partition(":")[0] in ASKING


def take_options(spec: Spec, allowed: Mapping[str, str]) -> dict[str, str]:
    """Put the options of a SPEC over their defaults; a `SpecError` for one that is not known."""
    for name in spec.options:
        if name in ("split", "rows") and name not in allowed:
            raise SpecError(
                f"{spec.text!r} has {name} as an option; write it as a suffix, @{name}={spec.options[name]}."
            )
        if name not in allowed:
            known, close = ", ".join(allowed) or "none", difflib.get_close_matches(name, allowed, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise SpecError(f"{spec.text!r} has the unknown option {name}{meant}; {spec.kind}: knows {known}.")
    return {**allowed, **spec.options}


def check_site_name(name: str, where: str) -> None:
    """Refuse, by a `DataError`, a site name that could not be a file name or a wire field everywhere."""
    if not _SITE_NAME.fullmatch(name):
        raise DataError(f"{where!r} names the site {name!r}; use up to 64 letters, digits, '_', '.' and '-'.")


def _meant(text: str) -> str:
    """Guess the SPEC that a person meant, with a misspelt kind or a table without one; else say what it starts with."""
    kind, colon, after = text.partition(":")
    if near := difflib.get_close_matches(kind, READERS, 1) if colon else []:
        return f"did you mean {near[0]}:{after}?"
    if Path(text.partition("@")[0]).suffix.lower() in (".csv", ".zip"):
        return f"did you mean manifest:{text}?"
    return f"it must start with one of {', '.join(kind + ':' for kind in READERS)}."


def _with_suffixes(spec: Spec, suffixes: Mapping[str, str]) -> Spec:
    if {"site", "split"} <= suffixes.keys() and suffixes["split"] != "test":
        raise SpecError(f"{spec.text!r} has both @site and @split; write only one of them.")
    if "site" in suffixes:
        try:
            check_site_name(suffixes["site"], spec.text)
        except DataError as error:
            raise SpecError(str(error)) from error
        spec = replace(spec, site=suffixes["site"])
    if suffixes.get("split") == "test":
        if spec.kind not in ASKING:
            raise SpecError(f"{spec.text!r} has @split=test, which is for questions alone ({', '.join(ASKING)}).")
        spec = replace(spec, test_only=True)
    elif "split" in suffixes:
        spec = replace(spec, iid_sites=_iid_sites(spec, suffixes["split"]))
    if spec.test_only and "rows" in suffixes:
        raise SpecError(f"{spec.text!r} has both @split=test and @rows; test questions are not dealt: leave @rows out.")
    return replace(spec, shares=_shares(spec.text, suffixes["rows"])) if "rows" in suffixes else spec


def _iid_sites(spec: Spec, value: str) -> int:
    scheme, _, number = value.partition(":")
    if scheme != "iid" or not number.isascii() or not number.isdigit() or not 1 <= int(number) <= MAX_SITES:
        alone = "@split=test for test questions alone, or " if spec.kind in ASKING else ""
        hint = "; options such as lang=zh stand before a suffix" if "," in value else ""
        raise SpecError(
            f"{spec.text!r} has @split={value}; allowed: {alone}@split=iid:N with N from 1 to {MAX_SITES}{hint}."
        )
    return int(number)


def _shares(text: str, value: str) -> Shares:
    found = _ROWS.fullmatch(value)
    train, tune, test = (int(part) for part in found.groups()) if found else (0, 0, 0)
    if train + tune + test != 100:
        raise SpecError(
            f"{text!r} has @rows={value}; give the per cent of train, tune and test rows as whole numbers from 1 "
            "that add up to 100, such as @rows=60/20/20."
        )
    return Shares(test=test / 100, tune=tune / (train + tune))


def _split_options(after: str) -> tuple[str, dict[str, str]]:
    """Cut trailing `,name=value` off; a path may hold commas and equal signs elsewhere."""
    body, options = after, {}
    while found := re.search(r"(?:^|,)([a-z_]+)=([^,/]*)$", body):
        options[found.group(1)] = found.group(2)
        body = body[: found.start()]
    return body, dict(reversed(options.items()))


def _path(spec: Spec) -> Path:
    if not spec.body:
        raise SpecError(f"{spec.text!r} names no path; write {spec.kind}:PATH.")
    return Path(spec.body).expanduser()


def _without_options(read: Callable[[Path], SourceRows]) -> Callable[[Spec, int], SourceRows]:
    def reader(spec: Spec, seed: int) -> SourceRows:
        take_options(spec, {})
        return read(_path(spec))

    return reader


def _lesions(spec: Spec, seed: int) -> SourceRows:
    return read_lesions(_lesion_settings(spec))


def _lesion_settings(spec: Spec) -> LesionSettings:
    if spec.body:
        raise SpecError(
            f"{spec.text!r} has {spec.body!r} before its options; write it like lesions:sites=6,images=600."
        )
    return parse_settings(take_options(spec, OPTIONS))


def _vqa_rad(spec: Spec, seed: int) -> SourceRows:
    take_options(spec, {})
    return read_vqa_rad(_path(spec), test_only=spec.test_only, pictures=spec.pictures)


def _slake(spec: Spec, seed: int) -> SourceRows:
    lang = take_options(spec, {"lang": "en"})["lang"]
    return read_slake(_path(spec), lang, test_only=spec.test_only, pictures=spec.pictures)


ASKING = ("vqa-rad", "slake")  # kinds whose rows are questions
READERS: dict[str, Callable[[Spec, int], SourceRows]] = {
    "manifest": _without_options(read_manifest),
    "isic2019": lambda spec, _: read_isic2019(_path(spec), **take_options(spec, {"split": "lesion"})),
    "folder": _without_options(read_folder),
    "lesions": _lesions,
    "cifar100": _without_options(read_cifar100),
    "tiny-imagenet": _without_options(read_tiny_imagenet),
    "domainnet": lambda spec, _: read_domainnet(_path(spec), **take_options(spec, {"classes": "ten"})),
    "inat": lambda spec, _: read_inat(_path(spec), take_options(spec, INAT_OPTIONS)),
    "vqa-rad": _vqa_rad,
    "slake": _slake,
}
