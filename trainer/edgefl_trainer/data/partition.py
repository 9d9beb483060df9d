"""Partitions: which site learns from, tunes on and reports on which image, made once and shared as a file.

Guarantees: every labelled image of the chosen classes goes to exactly one site; a lesion that a scheme deals stands in
one site only (`natural` keeps the sites of the data as they are), a lesion of a `whole` site in that one; what the data
holds out as `test` or `val` is dealt to the sites by the class shares of their training images; the same data, plan and
seed give the same digest, in whatever order the rows come. A changed file, or one of other data, is refused.
Source: docs/methods.md 8, docs/design.md 5 (Rows, partition).
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.dealing import TUNE_SHARE, USUAL, choose_share, choose_tune, deal_iid, deal_test
from edgefl_trainer.data.errors import DataError, PartitionError
from edgefl_trainer.data.partition_plan import ALPHA, PartitionPlan
from edgefl_trainer.data.rows import UNDEALT, Row, SourceRows
from edgefl_trainer.data.schemes import Lesion, dirichlet_by_class, dirichlet_by_site, follow, pathological
from edgefl_trainer.data.specs import Spec, check_site_name, parse_spec, read_spec

FORMAT = 1
PARTITION_FILE = "partition.json"  # its name in a run directory
MAX_PARTITION_BYTES = 256 << 20
ROW_KINDS = ("train", "tune", "val", "test")
LEFT_OUT = "left out"  # split of a row that no site has and that is not to be spread as an unlabelled one

DealtImage = tuple[str, str | None]  # image, class
Content = Mapping[str, Mapping[str, Sequence[DealtImage]]]  # site → kind → its images


@dataclass(frozen=True)
class Partition:
    """Who has which image."""

    plan: PartitionPlan  # how it was made
    seed: int  # of every choice of rows; a run that uses the partition makes its own choices of rows by it too
    classes: tuple[str, ...]  # classes of the data that were dealt, sorted
    held_out: tuple[str, ...]  # sites that never train, in name order
    sites: Content  # site → kind of `ROW_KINDS` → (image, class)

    @property
    def sha256(self) -> str:
        """The `partition_sha256` of a run over these sites with all their images and the data's own classes."""
        sites = {name: {**kinds, "unlabelled": ()} for name, kinds in self.sites.items()}
        return content_digest(sites, self.held_out)

    def counts(self, kinds: Sequence[str]) -> dict[str, Counter[str]]:
        """Count images by site and class among these kinds of rows."""
        return {
            name: Counter(str(label) for kind in kinds for _, label in rows[kind]) for name, rows in self.sites.items()
        }

    def tune_lesions(self, site: str, learning: Sequence[Row]) -> set[str]:
        """Return the lesions among a site's training rows whose images are its tune rows."""
        images = {image for image, _ in self.sites[site]["tune"]}
        return {row.lesion for row in learning if row.image in images}

    def to_bytes(self) -> bytes:
        """Write the file: JSON with a digest over sites, kinds, images and classes."""
        sites = {
            name: {kind: _by_label(rows[kind]) for kind in ROW_KINDS if rows[kind]} for name, rows in self.sites.items()
        }
        content = {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "seed": self.seed,
            "classes": self.classes,
            "held_out": self.held_out,
            "partition_sha256": self.sha256,
            "sites": sites,
        }
        return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"

    def facts(self) -> dict[str, Any]:
        """Return what a run's summary says about it."""
        return {**self.plan.to_json(), "seed": self.seed, "held_out": list(self.held_out), "sha256": self.sha256}


def content_digest(sites: Content, held_out: Sequence[str] = ()) -> str:
    """Compute SHA-256 over site → kind → sorted (image, class), and over the held-out sites where there are any."""
    content: object = {name: {kind: sorted(rows[kind]) for kind in rows} for name, rows in sites.items()}
    if held_out:
        content = {"held_out": sorted(held_out), "sites": content}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def make_partition(
    specs: Sequence[str], plan: PartitionPlan, seed: int, classes: Sequence[str] | None = None
) -> Partition:
    """Read the rows of the data (no pictures) and deal those of some classes; None deals all.

    Raises:
        DataError: The data cannot be read.
        PartitionError: No such partition can be made of it; the sentence says which number to change.
    """
    if not specs:
        raise DataError("No data was named; give at least one data SPEC.", "setting")
    parsed = [parse_spec(text) for text in specs]
    shares = {(spec.shares or USUAL).tune for spec in parsed}
    if len(shares) > 1:
        raise PartitionError("the data sources have different @rows: a partition needs the same @rows for all of them.")
    tables = [read_spec(spec, seed) for spec in parsed]
    if asking := [table.name for table in tables if table.asks]:
        raise PartitionError(f"{asking[0]} holds questions, and a partition deals pictures alone: use its own sites.")
    rows = [row for spec, table in zip(parsed, tables, strict=True) for row in own_rows(spec, table, seed)]
    return deal(rows, plan, seed, classes, tune_share=shares.pop())


def deal(
    rows: Sequence[Row],
    plan: PartitionPlan,
    seed: int,
    classes: Sequence[str] | None = None,
    *,
    tune_share: float = TUNE_SHARE,
) -> Partition:
    """Deal rows whose test rows are dealt already; raises as `make_partition`."""
    present = {row.label for row in rows if row.label is not None}
    wanted = tuple(sorted(present if classes is None else set(classes)))
    unknown = [name for name in wanted if name not in present]
    if unknown:
        raise PartitionError(f"class {unknown[0]!r} is not in the data, which has {', '.join(sorted(present))}.")
    taken = _unique([row for row in rows if takes_part(row, plan.scheme, wanted)])
    if not taken:
        raise PartitionError(
            f"scheme {plan.scheme} deals labelled images, and the data has none: name a site with "
            "@site, or another scheme."
        )
    dealt, domain_of = _deal_scheme(taken, plan, seed)
    sites = _content(dealt, seed, tune_share)
    for name, kinds in sites.items():
        check_site_name(name, f"scheme {plan.scheme}")
        if not kinds["train"]:
            raise PartitionError(f"site {name} has no image to train on: lower --sites, or use other data.")
    held_out = _hold_out(domain_of, plan, seed)
    return Partition(plan, seed, wanted, held_out, sites)


def sited_rows(spec: Spec, table: SourceRows, seed: int) -> list[Row]:
    """Return the rows of a table with the sites and test rows that its SPEC gives them, in order.

    Raises:
        DataError: `@site=NAME` names a site that the data does not have, or `@rows` is given to data with splits.
    """
    rows = list(table.rows)
    if spec.shares is not None and not any(row.split == UNDEALT and row.label is not None for row in rows):
        raise DataError(f"{spec.text!r} has @rows, but the source deals all its rows itself; leave @rows out.")
    if spec.site is not None and all(row.site is None for row in rows):
        rows = [replace(row, site=spec.site) for row in rows]
    elif spec.site is not None and spec.site not in {row.site for row in rows}:
        found = ", ".join(sorted({row.site for row in rows if row.site})[:20]) or "none"
        given = spec.text.partition("@site=")[0]  # `join --site` wrote the rest
        raise DataError(f"{given!r} has no site {spec.site}; the sites of the data are {found}.")
    # before new sites are dealt by the run's seed, which must not move a lesion into `test`
    rows = deal_test(rows, (spec.shares or USUAL).test)
    return rows if spec.iid_sites is None else deal_iid(rows, spec.iid_sites, seed)


def own_rows(spec: Spec, table: SourceRows, seed: int) -> list[Row]:
    """Return the rows of `sited_rows`; those of sites that `@site=NAME` does not ask for are marked as left out."""
    rows = sited_rows(spec, table, seed)
    return [row if spec.site in (None, row.site) else replace(row, site=None, split=LEFT_OUT) for row in rows]


def takes_part(row: Row, scheme: str, classes: Sequence[str]) -> bool:
    """Tell whether a row is dealt: it has a label, and a site where the scheme starts from the data's sites."""
    sited = row.site is not None or scheme not in ("natural", "domain")
    return sited and row.split in ("train", "val", "test") and row.label in classes


def place_rows(rows: Sequence[Row], partition: Partition) -> list[Row]:
    """Give rows the sites and splits of a partition; tune rows are `train` here.

    Unlabelled images keep their site under `natural` and in `whole` sites; else they have none and can be spread. A
    `DataError` where the rows are not those that were dealt.
    """
    places = {
        image: (site, kind, label)
        for site, kinds in partition.sites.items()
        for kind, entries in kinds.items()
        for image, label in entries
    }
    taken = _unique([row for row in rows if takes_part(row, partition.plan.scheme, partition.classes)])
    missing = len(places.keys() - {row.image for row in taken})
    if missing:
        raise DataError(
            f"{missing} of {len(places)} images of the partition are not in the data: name the data that it was "
            "made from."
        )

    def placed(row: Row) -> Row:
        if row.split == "unlabelled":
            natural = partition.plan.scheme == "natural" or row.site in (partition.plan.whole or ())
            stays = natural and row.site in partition.sites
            return row if stays else replace(row, site=None)
        if not takes_part(row, partition.plan.scheme, partition.classes):
            return replace(row, site=None, split=LEFT_OUT)
        site, kind, label = places.get(row.image, ("", "", None))
        if label != row.label:
            found = "is not in the partition" if label is None else f"has the class {label} in the partition"
            raise DataError(
                f"Image {row.image!r} ({row.label}) {found}: name the data that the partition was made from."
            )
        return replace(row, site=site, split="train" if kind == "tune" else kind)

    return [placed(row) for row in rows]


def read_partition(path: Path) -> Partition:
    """Read and check a partition file.

    A `DataError` where it is none, or was changed since it was made; a `StorageError` where it cannot be read.
    """
    try:
        found = json.loads(read_bounded(path, MAX_PARTITION_BYTES))
        partition = _from_json(found)
        digest = found["partition_sha256"]
    except PartitionError as error:
        raise DataError(f"the partition {path} cannot be used: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a partition file ({type(error).__name__}: {error}): make one with `edgefl-train partition`."
        ) from error
    if partition.sha256 != digest:
        raise DataError(f"{path} was changed after it was made (its digest differs): make it again.")
    for name in partition.sites:
        check_site_name(name, str(path))
    return partition


def _from_json(found: Mapping[str, Any]) -> Partition:
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']!r}, but only format {FORMAT} is known")
    plan = PartitionPlan(**{str(name): value for name, value in found["plan"].items()})
    sites = {
        str(name): {kind: _entries(kinds.get(kind, {})) for kind in ROW_KINDS}
        for name, kinds in sorted(found["sites"].items())
    }
    held_out = tuple(sorted(map(str, found["held_out"])))
    images = Counter(image for kinds in sites.values() for entries in kinds.values() for image, _ in entries)
    if not set(held_out) < set(sites) or any(count > 1 for count in images.values()):
        raise ValueError("a held-out site is unknown, no site is left to train, or an image is listed twice")
    return Partition(plan, int(found["seed"]), tuple(map(str, found["classes"])), held_out, sites)


def _entries(by_label: Mapping[str, Sequence[str]]) -> tuple[DealtImage, ...]:
    return tuple(sorted((str(image), str(label)) for label, images in by_label.items() for image in images))


def _deal_scheme(rows: Sequence[Row], plan: PartitionPlan, seed: int) -> tuple[list[Row], dict[str, str]]:
    """Rows with their new sites, and the domain (stratum of the held-out sites) of each site."""
    if plan.scheme == "natural":
        return list(rows), {row.site: "" for row in rows if row.site is not None}
    if plan.scheme != "domain":
        assert plan.sites is not None
        kept, others = _whole_sites(rows, plan.whole or ())
        names = _site_names("iid" if plan.scheme == "iid" else "site", plan.dealt)
        if twice := set(names) & {str(row.site) for row in kept}:
            raise PartitionError(f"--whole names {min(twice)}, which is what a site that is dealt will be called.")
        return [*kept, *_deal_group(others, names, plan, seed)], dict.fromkeys([*names, *(plan.whole or ())], "")
    groups = _domains(rows)
    count = len(groups) if plan.sites is None else plan.sites
    if count % len(groups):
        raise PartitionError(
            f"{count} sites cannot be shared equally among {len(groups)} domains: give --sites {len(groups)} or a "
            "multiple of it."
        )
    dealt: list[Row] = []
    domain_of: dict[str, str] = {}
    for domain, members in groups.items():
        each = count // len(groups)
        names = [domain] if each == 1 else _site_names(domain, each)
        dealt += _deal_group(members, names, plan, seed)
        domain_of |= dict.fromkeys(names, domain if each > 1 else "")
    return dealt, domain_of


def _whole_sites(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """The rows of the sites that stay as they are, and all others; a lesion of such a site stays there altogether."""
    present = {row.site for row in rows}
    for name in names:
        if name not in present:
            known = ", ".join(sorted(site for site in present if site)[:20]) or "none"
            raise PartitionError(f"--whole names {name}, which the data does not have; its sites are {known}.")
    home = {row.lesion: row.site for row in sorted(rows, key=lambda row: str(row.site)) if row.site in names}
    kept = [replace(row, site=home[row.lesion]) for row in rows if row.lesion in home]
    others = [row for row in rows if row.lesion not in home]
    if not any(row.split == "train" for row in others):
        raise PartitionError("--whole names all sites of the data: leave out those that are to be dealt.")
    return kept, others


def _deal_group(rows: Sequence[Row], names: Sequence[str], plan: PartitionPlan, seed: int) -> list[Row]:
    """Deal rows to new sites; the rows that only report follow the class shares of those that learn."""
    count = len(names)
    if plan.scheme == "iid" or (plan.scheme == "domain" and plan.classes_per_site is None):
        if len({row.lesion for row in rows if row.split == "train"}) < count:
            raise PartitionError(f"{count} sites are more than the lesions in the training data: lower --sites.")
        number = {name: names[i] for i, name in enumerate(_site_names("iid", count))}
        return [replace(row, site=number[str(row.site)]) for row in deal_iid(rows, count, seed)]
    learning = _lesions([row for row in rows if row.split == "train"])
    if len(learning) < count:
        raise PartitionError(
            f"{count} sites are more than the {counted(len(learning), 'lesion')} in the training data: lower --sites."
        )
    site_of = _deal_lesions(learning, count, plan, seed)
    shares = {label: [0] * count for label in sorted({lesion.label for lesion in learning})}
    for lesion in learning:
        shares[lesion.label][site_of[lesion.name]] += lesion.images
    for split in ("val", "test"):
        rest = _lesions([row for row in rows if row.split == split and row.lesion not in site_of])
        site_of |= follow(rest, shares, split, seed)
    return [replace(row, site=names[site_of[row.lesion]]) for row in rows]


def _deal_lesions(lesions: Sequence[Lesion], sites: int, plan: PartitionPlan, seed: int) -> dict[str, int]:
    if plan.classes_per_site is not None:
        return pathological(lesions, sites, plan.classes_per_site, seed)
    alpha = ALPHA if plan.alpha is None else plan.alpha
    draw = dirichlet_by_site if plan.by == "site" else dirichlet_by_class
    return draw(lesions, sites, alpha, seed)


def _lesions(rows: Sequence[Row]) -> list[Lesion]:
    """The lesions of labelled rows; one with several labels counts as that of its first image in name order."""
    sizes = Counter(row.lesion for row in rows)
    label_of = {row.lesion: str(row.label) for row in sorted(rows, key=lambda row: row.image, reverse=True)}
    return [Lesion(name, label_of[name], count) for name, count in sizes.items()]


def _domains(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Domain → rows; a lesion of two domains goes with the first of them."""
    domain_of = {row.lesion: str(row.site) for row in sorted(rows, key=lambda row: str(row.site), reverse=True)}
    groups: dict[str, list[Row]] = {name: [] for name in sorted(set(domain_of.values()))}
    for row in rows:
        groups[domain_of[row.lesion]].append(row)
    return groups


def _content(rows: Sequence[Row], seed: int, tune_share: float) -> Content:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row.site)].append(row)
    return {name: dict(_site_content(name, groups[name], seed, tune_share)) for name in sorted(groups)}


def _site_content(
    name: str, rows: Sequence[Row], seed: int, tune_share: float
) -> Iterator[tuple[str, tuple[DealtImage, ...]]]:
    tune = choose_tune(name, [row for row in rows if row.split == "train"], seed, tune_share)
    for kind in ROW_KINDS:
        split = "train" if kind == "tune" else kind
        chosen = [
            row for row in rows if row.split == split and (split != "train" or (row.lesion in tune) == (kind == "tune"))
        ]
        yield kind, tuple(sorted((row.image, str(row.label)) for row in chosen))


def _hold_out(domain_of: Mapping[str, str], plan: PartitionPlan, seed: int) -> tuple[str, ...]:
    """The sites that are named, or `round(share · C)` of all, the same share of every domain."""
    if plan.hold_out is not None:
        if not set(plan.hold_out) < set(domain_of):
            raise PartitionError(f"--hold-out names some of {', '.join(sorted(domain_of)[:20])}, and not all.")
        return plan.hold_out
    if not (share := plan.holdout_sites):
        return ()
    chosen = choose_share(domain_of, share, "held-out sites", seed)
    if not chosen:
        raise PartitionError(
            f"a share of {share:g} of {counted(len(domain_of), 'site')} is less than one site: give a larger "
            "--holdout-sites, or more sites."
        )
    return tuple(sorted(chosen))


def _unique(rows: Sequence[Row]) -> list[Row]:
    names = Counter(row.image for row in rows)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise DataError(f"Image {twice!r} is in two of the data sources; a partition needs each name once.")
    return list(rows)


def _by_label(entries: Sequence[DealtImage]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for image, label in sorted(entries):
        groups[str(label)].append(image)
    return dict(sorted(groups.items()))


def _site_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{i + 1:0{len(str(count))}d}" for i in range(count)]
