"""The lines of what is sent of pictures: re-identification in two views, and reconstruction, each with its control."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from edgefl_trainer.audit.audited import Audited
from edgefl_trainer.audit.averaged_maps import Averaging, averaging_of
from edgefl_trainer.audit.bounds import unit_bounds
from edgefl_trainer.audit.head_change import head_release
from edgefl_trainer.audit.identification import (
    Game,
    Whitening,
    best_hits,
    games,
    guessed_hits,
    knowing_classes,
    together,
)
from edgefl_trainer.audit.line import AuditLine, NotAttacked
from edgefl_trainer.audit.payloads import PicturePayload, Read, release_of
from edgefl_trainer.audit.pictures import (
    CANDIDATES,
    VIEWS,
    Public,
    Queries,
    View,
    learned_rows,
    orientations,
    public_of,
    queries_of,
)
from edgefl_trainer.audit.reconstruction import class_pictures, fit_decoder, similarities, thumbnails
from edgefl_trainer.contract import Site

PICTURE_KINDS: Final = ("maps", "features", "prototypes", "logits", "weights")
ALONE: Final = 30  # pictures a site from which it learns alone
THUMBNAIL: Final = 14  # px a side of the picture that is the control
PUBLIC: Final = 600  # pictures of other sites
RE_IDENTIFIED, RESEMBLANCE = 0.05, 0.30  # targets of docs/security.md 7, check 53
NEEDED: Final = {VIEWS[0]: 0.5, VIEWS[1]: 0.25}  # top-1 of the control, ten and five times the target
CLEARER: Final = 0.1  # than the floor that the control of a reconstruction has to be
LEARNED_ALONE: Final = "one step from this picture alone"
DRAWN_OF_OVER: Final = {"picture": "lesion", "class": "site and class", "site": "site"}  # of `line.DRAWN_OF`
CONTROL: Final = f"the picture itself, {THUMBNAIL} px a side"


@dataclass(frozen=True)
class SitePayloads:
    """What an attack on one kind of payload reads of one site."""

    site: Site
    release: PicturePayload
    means: dict[int, np.ndarray]
    averaging: Averaging | None  # where a map travels in a mean of a few
    public: Public
    known: np.ndarray  # what the public pictures give, (n, P)

    def payloads(self, queries: Queries) -> np.ndarray:
        """Make the payload that each picture took part in, (n, P)."""
        found = self.release.payloads(self.means, queries.pictures, queries.labels)
        return found if self.averaging is None else self.averaging.averaged(found, queries.labels, queries.lesions)

    @property
    def against(self) -> str:
        """What the attacker has, in words."""
        if self.averaging is not None:
            return f"the mean of the maps of at most {self.averaging.others + 1} pictures of a class"
        return _against(self.release)

    @property
    def examples(self) -> np.ndarray:
        """What a decoder learns from, (n, P): what public pictures give, averaged as the site does."""
        if self.averaging is None:
            return self.known
        return self.averaging.of_others(self.known, self.public.labels)


@dataclass(frozen=True, kw_only=True)
class PlayedGames:
    """The games of one site, by measure."""

    exported: Mapping[str, Game]  # with the site's own model
    member: Mapping[str, Game] | None  # with another site's
    control: Mapping[str, Game]
    floor: np.ndarray  # hits of who has no payload, but knows the class where the payload names it, (n,)


def payload_lines(audited: Audited) -> Iterator[AuditLine | NotAttacked]:
    """Attack each kind that is sent of pictures."""
    for kind in audited.method.travels:
        if kind not in PICTURE_KINDS:
            continue
        found = [_site_payloads(audited, name, kind) for name in audited.attacked]
        yield from _named(found, audited.attacked, len(audited.sites))
        parts = [one for one in found if isinstance(one, SitePayloads)]
        if not parts:
            continue
        for view in VIEWS:
            yield from _identified(audited, kind, view, parts)
        yield from _reconstructed(audited, kind, parts)


def _named(found: Sequence[SitePayloads | NotAttacked], names: Sequence[str], trained: int) -> Iterator[NotAttacked]:
    """Say once why payloads of some sites are not attacked; where it is not so of all that trained, of which."""
    refused = [(one, name) for one, name in zip(found, names, strict=True) if isinstance(one, NotAttacked)]
    for kind, attack, why in dict.fromkeys((one.kind, one.attack, one.why) for one, _ in refused):
        sites = tuple(name for one, name in refused if one.why == why)
        whose = "" if len(sites) == trained else f" (of {', '.join(sites)})"
        yield NotAttacked(kind, attack, f"{why}{whose}", sites)


def _site_payloads(audited: Audited, name: str, kind: str) -> SitePayloads | NotAttacked:
    site = audited.sites[name]
    audited.report(f"{kind}: what {name} sends")
    if kind == "weights":
        release = _head_release(audited, name)
    else:
        release = release_of(audited.run, audited.method, audited.server, site, kind)
    if isinstance(release, NotAttacked):
        return release
    others = [one for other, one in audited.sites.items() if other != name]
    public = public_of(audited.federation, others, PUBLIC, audited.run.settings.seed)
    if len(public.pictures) < CANDIDATES:
        why = f"the other sites have {len(public.pictures)} training pictures, and {CANDIDATES} are needed"
        return NotAttacked(kind, "re-identification and reconstruction", why)
    averaging = averaging_of(audited.method, release, site, audited.federation, audited.run.settings.seed)
    return SitePayloads(site, release, release.means(site), averaging, public, release.guessed(public.pictures))


def _queries(
    audited: Audited, parts: Sequence[SitePayloads], view: View
) -> tuple[list[tuple[SitePayloads, Queries]], dict[str, str]]:
    """Choose whom to look for at each site; and of other sites why not."""
    found: list[tuple[SitePayloads, Queries]] = []
    refused: dict[str, str] = {}
    for part in parts:
        learned = learned_rows(part.site, needs_labels=audited.method.needs_labels)
        one = queries_of(audited.federation, part.site, learned, view, audited.pictures, audited.run.settings.seed)
        if isinstance(one, str):
            refused[part.site.name] = one
        else:
            found.append((part, one))
    return found, refused


def _identified(
    audited: Audited, kind: str, view: View, parts: Sequence[SitePayloads]
) -> Iterator[AuditLine | NotAttacked]:
    attack = f"re-identification, {view}"
    if view == VIEWS[1] and parts[0].release.over != "picture":
        yield NotAttacked(kind, attack, "both photos of a lesion took part in the mean, so neither is another photo")
        return
    chosen, refused = _queries(audited, parts, view)
    yield from (NotAttacked(kind, attack, why, (name,)) for name, why in refused.items())
    if not chosen:
        return
    played = [_played(audited, view, part, queries) for part, queries in chosen]
    hits, measure = best_hits(together([one.exported for one in played]))
    control, _ = best_hits(together([one.control for one in played]))
    floors, units = np.concatenate([one.floor for one in played]), units_of(chosen)
    interval, minus_floor_interval = unit_bounds(hits, floors, units, shares=True)
    members = [one.member for one in played if one.member is not None]
    more = {"chance": 1 / CANDIDATES}
    if members:
        more["with another site's model"] = float(best_hits(together(members))[0].mean())
    yield AuditLine(
        kind=kind,
        attack=attack,
        against=parts[0].against,
        measure=measure,
        figure=float(hits.mean()),
        interval=interval,
        floor=float(floors.mean()),
        floor_of="the class alone" if parts[0].release.names_class else "chance",
        control=float(control.mean()),
        control_of=CONTROL if parts[0].release.alone is None else LEARNED_ALONE,
        needs=NEEDED[view],
        target=RE_IDENTIFIED,
        pictures=len(hits),
        sites=tuple(part.site.name for part, _ in chosen),
        more=more,
        drawn=len(set(units)),
        drawn_of=DRAWN_OF_OVER[parts[0].release.over],
        minus_floor=float((hits - floors).mean()),
        minus_floor_interval=minus_floor_interval,
    )


def units_of(chosen: Sequence[tuple[SitePayloads, Queries]]) -> list[str]:
    """Say of each picture what it shares with others: the item of the payload, else its lesion."""
    units: list[str] = []
    for part, queries in chosen:
        if part.release.over == "picture":
            units += queries.lesions
        elif part.release.over == "class":
            units += [f"{label} {part.site.name}" for label in queries.labels]
        else:
            units += [part.site.name] * len(queries.labels)
    return units


def _played(audited: Audited, view: View, part: SitePayloads, queries: Queries) -> PlayedGames:
    """Play the games of one site: with its model, with another site's, and the control."""
    release, public = part.release, part.public
    audited.report(f"{release.kind}: re-identification, {view}, {part.site.name}")
    candidates, usual = _candidates(view, release.guessed, queries), Whitening.of(part.known)
    payloads = part.payloads(queries)
    member = None
    if release.by_member is not None:
        theirs = Whitening.of(release.by_member(public.pictures))
        member = _games(release, queries, payloads, _candidates(view, release.by_member, queries), theirs)
    if release.alone is not None:
        alone = release.alone(queries.pictures[:ALONE], queries.labels[:ALONE])
        control = _games(release, queries, alone, candidates, usual)
    else:
        small = partial(thumbnails, side=THUMBNAIL)
        raw = Whitening.of(small(public.pictures))
        control = games(small(queries.pictures), *_candidates(view, small, queries), raw)
    return PlayedGames(
        exported=_games(release, queries, payloads, candidates, usual),
        member=member,
        control=control,
        floor=floor_hits(release, queries),
    )


def floor_hits(release: PicturePayload, queries: Queries) -> np.ndarray:
    """Compute how often who has no payload is right, (n,); it knows the class where the payload names that."""
    if not release.names_class:
        return np.full(len(queries.labels), 1 / (1 + len(queries.rivals)))
    return guessed_hits(queries.labels, queries.rival_labels)


def floor_pictures(release: PicturePayload, queries: Queries, public: Public, classes: int) -> np.ndarray:
    """Make what stands for each picture without the payload, (n, px, px, 3): the mean of its class, else of all."""
    usual = class_pictures(public.pictures, public.labels, classes)
    return np.asarray(usual[queries.labels if release.names_class else np.full(len(queries.labels), -1)])


def _candidates(view: View, guessed: Read, queries: Queries) -> tuple[np.ndarray, np.ndarray]:
    """Compute what the right candidates and the rivals give, a changed picture in each orientation; (n, V, P) each."""

    def views(pictures: np.ndarray) -> np.ndarray:
        if view != VIEWS[0]:
            return guessed(pictures)[:, None]
        turned = orientations(pictures)
        found = guessed(np.ascontiguousarray(turned.reshape(-1, *turned.shape[2:])))
        return found.reshape(*turned.shape[:2], -1)

    return views(queries.others), views(queries.rivals)


def _games(
    release: PicturePayload,
    queries: Queries,
    payloads: np.ndarray,
    candidates: tuple[np.ndarray, np.ndarray],
    usual: Whitening,
) -> dict[str, Game]:
    """Compare the first payloads with their candidates, of their class alone where the payload names it."""
    own, rivals = candidates
    found = games(payloads, own[: len(payloads)], rivals, usual)
    if not release.names_class:
        return found
    labels = queries.labels[: len(payloads)]
    return {name: knowing_classes(game, labels, queries.rival_labels) for name, game in found.items()}


def _head_release(audited: Audited, name: str) -> PicturePayload | NotAttacked:
    if not audited.run.sites:
        why = "the run learned an encoder without labels, and the attack reads the head's row of each class"
        return NotAttacked("weights", "re-identification and reconstruction", why)
    return head_release(audited.method, audited.server, audited.sites[name], audited.states[name], "weights")


def _reconstructed(audited: Audited, kind: str, parts: Sequence[SitePayloads]) -> Iterator[AuditLine | NotAttacked]:
    chosen, refused = _queries(audited, parts, VIEWS[0])
    yield from (NotAttacked(kind, "reconstruction", why, (name,)) for name, why in refused.items())
    if not chosen:
        return
    alike: list[np.ndarray] = []
    floors: list[np.ndarray] = []
    controls: list[np.ndarray] = []
    small = partial(thumbnails, side=THUMBNAIL)
    for part, queries in chosen:
        audited.report(f"{kind}: reconstruction, {part.site.name}")
        px, public = queries.pictures.shape[1], part.public
        payloads = part.payloads(queries)
        decoder = fit_decoder(part.examples, public.pictures)
        alike.append(similarities(decoder.decode(payloads, px), queries.pictures))
        usual = floor_pictures(part.release, queries, public, len(audited.federation.classes))
        floors.append(similarities(usual, queries.pictures))
        control = fit_decoder(small(public.pictures), public.pictures).decode(small(queries.pictures), px)
        controls.append(similarities(control, queries.pictures))
    values, usual_values, units = np.concatenate(alike), np.concatenate(floors), units_of(chosen)
    floor = float(usual_values.mean())
    interval, minus_floor_interval = unit_bounds(values, usual_values, units, shares=False)
    yield AuditLine(
        kind=kind,
        attack="reconstruction",
        against=parts[0].against,
        measure="kernel ridge regression",
        figure=float(values.mean()),
        interval=interval,
        floor=floor,
        floor_of=f"mean picture {'of the class ' if parts[0].release.names_class else ''}at other sites",
        control=float(np.concatenate(controls).mean()),
        control_of=CONTROL,
        needs=floor + CLEARER,
        target=RESEMBLANCE,
        pictures=len(values),
        sites=tuple(part.site.name for part, _ in chosen),
        drawn=len(set(units)),
        drawn_of=DRAWN_OF_OVER[parts[0].release.over],
        minus_floor=float((values - usual_values).mean()),
        minus_floor_interval=minus_floor_interval,
    )


def _against(release: PicturePayload) -> str:
    return {
        "picture": "what is sent of each picture",
        "class": "a mean over the site's pictures of a class"
        if release.alone is None
        else "what a round changes of the head",
        "site": "a mean over all pictures of the site",
    }[release.over]
