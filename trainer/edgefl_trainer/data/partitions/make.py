"""Deal the rows of data to sites.

Guarantees: every labelled image of the chosen classes goes to exactly one site; a lesion that a scheme deals stands in
one site only (`natural` keeps the sites of the data as they are), a lesion of a `whole` site in that one; what the data
holds out as `test` or `val` is dealt to the sites by the class shares of their training images; the same data, plan and
seed give the same digest, in whatever order the rows come. Source: docs/methods.md 8, docs/design.md 5 (Rows,
partition).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.dealing import TUNE_SHARE, USUAL, choose_share, choose_tune, deal_iid
from edgefl_trainer.data.errors import DataError, PartitionError
from edgefl_trainer.data.partitions.partition import ROW_KINDS, Content, DealtImage, Partition
from edgefl_trainer.data.partitions.place import takes_part, unique_rows
from edgefl_trainer.data.partitions.plan import ALPHA, PartitionPlan
from edgefl_trainer.data.partitions.schemes import (
    Lesion,
    dirichlet_by_class,
    dirichlet_by_site,
    follow,
    pathological,
)
from edgefl_trainer.data.rows import Row
from edgefl_trainer.data.sited_rows import own_rows
from edgefl_trainer.data.specs import check_site_name, parse_spec, read_spec


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
    return deal(own_rows(parsed, tables, seed), plan, seed, classes, tune_share=shares.pop())


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
    taken = unique_rows([row for row in rows if takes_part(row, plan.scheme, wanted)])
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


def _site_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{i + 1:0{len(str(count))}d}" for i in range(count)]
