"""What the signed task and a site's own data make together: method, settings, task, backbone, site.

Guarantees: method, hyper-parameters, classes, rounds, epochs and seed are the coordinator's, the rows are the site's;
nothing begins before it is known that this version has that method with those settings, that the data has no other
classes, and that the frozen network here is the one the federation agreed on, by its SHA-256. Each of these fails with
one sentence. Source: docs/design.md 4 and 5; docs/decisions/0030.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.sentences import listed
from edgefl_trainer.contract import Method, Site, Task, declared
from edgefl_trainer.data import Federation
from edgefl_trainer.data.class_numbers import in_classes
from edgefl_trainer.data.errors import TaskError
from edgefl_trainer.data.federation import dealt_rows
from edgefl_trainer.data.questions import Vocabulary
from edgefl_trainer.data.specs import asks_questions, parse_spec, read_spec
from edgefl_trainer.engine.privacy.ledger import check_spendable
from edgefl_trainer.engine.settings import Budget, MostImages, RunSettings
from edgefl_trainer.engine.sites import build_sites, load_data
from edgefl_trainer.errors import FederationRefused, SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import (
    build_network,
    frozen_network,
    load_backbone,
    weights_of,
)
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.spec import BackboneSpec, CNNSpec, spec_from_facts

UPDATE = "update edgefl-derm here, or ask the operator which version the federation uses"
PATHS = ("run", "file")  # kinds of backbone names that mean a place on one machine
TIMM = ("timm", "cnn")  # kinds that timm makes; whatever has a colon or a slash it would fetch from anybody's hub
PLAIN = re.compile(r"[A-Za-z0-9_.-]+")  # a name of timm's own
SHAPE = ("architecture", "image_px", "patch", "depth", "heads", "width", "mean", "std")


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """What a site decides itself."""

    data: tuple[str, ...]  # SPECs of its images
    site: str = ""  # which site of the data it is; empty where the data has one
    task: str = ""  # how its classes become the federation's; empty: they are named alike, or nevus and other
    classes: tuple[str, ...] = ()  # use only images of these classes; empty for all
    backbone: str = ""  # its copy of the federation's network; empty for the one the task names
    images_per_site: MostImages = 0  # most training images, 0 for all
    unlabelled: Literal["none", "site", "spread"] | None = None  # use of images without a label
    balance: Literal["none", "class"] = "none"  # draw the classes equally
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute
    autocast: Literal["auto", "none", "bf16"] = "auto"  # precision of the backbone
    privacy_budget: Budget = 0.0  # most epsilon that it spends on noised releases; 0: no bound


@dataclass(frozen=True)
class SiteWork:
    """All that a site needs to learn."""

    settings: RunSettings  # of its run directory
    method: Method  # with the federation's hyper-parameters
    task: Task  # what server and sites agree on
    backbone: Backbone  # frozen, of the run
    federation: Federation  # its own rows
    site: Site  # as the method sees it


def prepare(told: TaskReply, options: SiteOptions, vocabulary: Vocabulary | None = None) -> SiteWork:
    """Read data and backbone, and check that they fit the task.

    Args:
        vocabulary: answers and words of all sites, where the pictures are asked questions.

    Raises:
        FederationRefused: the task cannot be done by this version or with this backbone.
        SettingError: an option does not fit the task.
        BackboneError: there is no such backbone.
        DataError: the data cannot be read.
        TrainingError: there is no image to learn from.
    """
    settings = settings_of(told, options, asked=vocabulary is not None)
    method = settings.build_method()
    backbone = local_backbone(told, method, options)
    settings = replace(settings, image_px=backbone.spec.image_px, backbone=named(told, options))
    read = load_data(settings, backbone.spec.image_px, whole_task=False, vocabulary=vocabulary)
    federation = only_site(read, options.site)
    if method.needs_labels and vocabulary is None:
        advice = "use the federation's names, or choose images with --classes."
        federation = in_classes(federation, told.classes, whose="the federation", advice=advice, kind=TaskError)
    task = Task(
        name=settings.task if method.needs_labels else "pixels",
        classes=federation.classes,
        backbone=backbone.spec,
        rounds=told.train_rounds,
        epochs=told.epochs,
        seed=told.seed,
        questions=None if vocabulary is None else vocabulary.questions,
    )
    sites = build_sites(federation, task, backbone, settings, method)
    [site] = sites.values()
    method.start(task, [site.name])  # what does not fit this backbone shows here
    return SiteWork(settings, method, task, backbone, federation, replace(site, noise="secret"))


def settings_of(told: TaskReply, options: SiteOptions, *, asked: bool = False) -> RunSettings:
    """Make the settings of the site's run directory; `asked` where the federation learns answers.

    Raises:
        FederationRefused: this version does not have the method with these settings, or the coordinator tells too
            little.
        SettingError: an option has no meaning with this method.
    """
    kind = METHODS.get(told.method)
    if kind is None:
        raise FederationRefused(
            f"the federation runs the method {told.method}, which this version does not know: {UPDATE}."
        )
    if not (told.train_rounds and told.epochs and told.backbone):
        raise FederationRefused(
            "the coordinator does not state rounds, epochs and backbone of its task: ask its operator to update "
            "edgefl-derm."
        )
    if not kind.needs_labels and options.balance != "none":
        raise SettingError(f"{told.method} uses no labels, so --balance {options.balance} has no effect: leave it out.")
    if not asked and kind.needs_labels and any(map(asks_questions, options.data)):
        raise SettingError("a live federation learns no answers, and the data holds questions: name other data.")
    unlabelled = options.unlabelled or ("none" if kind.needs_labels else "spread")
    try:
        settings = RunSettings(
            method=told.method,
            data=located(options.data, options.site),
            task=options.task or ("nevus" if told.task == "nevus" else "all"),
            classes=options.classes,
            backbone=options.backbone or str(told.backbone.get("name")),
            rounds=told.train_rounds,
            epochs=told.epochs,
            images_per_site=options.images_per_site,
            unlabelled=unlabelled,
            balance=options.balance,
            seed=told.seed,
            device=options.device,
            autocast=options.autocast,
            privacy_budget=options.privacy_budget,
            hyper={
                name: tuple(int(one) for one in value) if isinstance(value, tuple) else value
                for name, value in told.settings.items()
            },
        )
        method = settings.build_method()
    except SettingError as error:
        raise FederationRefused(
            f"this version cannot run {told.method} with the federation's settings ({error}): {UPDATE}."
        ) from error
    if not method.phases(told.train_rounds):
        raise FederationRefused(f"{told.method} exchanges nothing, so there is nothing to join.")
    if told.travels and set(told.travels) != set(method.travels):
        raise FederationRefused(
            f"the federation says that {listed(told.travels)} leave a site, but {told.method} of this version sends "
            f"{listed(method.travels) or 'nothing'}: {UPDATE}."
        )
    check_spendable(settings, method, "ask the operator for a federation whose sites send under noise (dp_noise)")
    return settings


def local_backbone(told: TaskReply, method: Method, options: SiteOptions) -> Backbone:
    """Find the task's network on this machine.

    A method that learns the network receives its weights from the server, so only the architecture has to be the same.

    Raises:
        FederationRefused: the network here is another one, or the task describes none.
        SettingError: it has to be named.
        BackboneError: there is no such backbone.
    """
    try:
        wanted = spec_from_facts(told.backbone)
    except TypeError as error:
        raise FederationRefused(
            f"the task describes no backbone that this version knows ({error}): {UPDATE}."
        ) from error
    if isinstance(wanted, CNNSpec) and not PLAIN.fullmatch(str(wanted.architecture)):
        raise FederationRefused(
            f"the task's network {str(wanted.architecture)[:60]!r} is not a name that timm knows, and nothing is "
            "fetched from an address that a coordinator gives: ask its operator for a network that timm knows."
        )
    learned = not declared(method).freezes
    name = options.backbone or wanted.name
    if not options.backbone and is_elsewhere(wanted.name):
        if learned and (isinstance(wanted, CNNSpec) or not wanted.name.startswith("timm:")):
            return frozen_network(wanted, weights_of(build_network(wanted, told.seed)))
        raise SettingError(
            f"the federation's backbone is {wanted.name} with SHA-256 {wanted.sha256}: name your copy with --backbone."
        )
    found = load_backbone(name, image_px=wanted.image_px, seed=told.seed)
    if learned and shape(found.spec) == shape(wanted):
        return found
    if found.spec.sha256 != wanted.sha256 or shape(found.spec) != shape(wanted):
        raise FederationRefused(
            f"your backbone {name} has the SHA-256 {found.spec.sha256[:16]}…, but the federation's {wanted.name} "
            f"has {wanted.sha256[:16]}…: ask the operator for that file and name it with --backbone file:PATH."
        )
    return found


def is_elsewhere(name: str) -> bool:
    """Tell whether a coordinator's name means a file or somebody's hub: a person has to say which copy is meant.

    Else a coordinator could have a site fetch and read what it likes (docs/security.md, attack list 5).
    """
    kind, _, rest = name.partition(":")
    return not name or kind in PATHS or (kind in TIMM and not PLAIN.fullmatch(rest))


def named(told: TaskReply, options: SiteOptions) -> str:
    """Return the backbone's name as `config.toml` has it."""
    return options.backbone or str(told.backbone["name"])


def shape(spec: BackboneSpec) -> Mapping[str, Any]:
    """Return the facts that two networks must share to exchange weights."""
    return {name: getattr(spec, name, None) for name in SHAPE}


def located(data: Sequence[str], site: str) -> tuple[str, ...]:
    """Limit the SPECs to one site, where one is named."""
    return tuple(text if not site or "@site=" in text else f"{text}@site={site}" for text in data)


def only_site(federation: Federation, site: str) -> Federation:
    """Return the rows of one site; a `SettingError` where the data has several and none is chosen."""
    chosen = _chosen(sorted(federation.sites), site)
    return replace(federation, sites={chosen: federation.sites[chosen]}, held_out=())


def check_site(options: SiteOptions) -> None:
    """Refuse data that cannot be read, or has no such site, before an invite is spent on it.

    A `DataError` or `SettingError`, as `prepare` raises it; no picture is read.
    """
    specs = [parse_spec(text) for text in located(options.data, options.site)]
    rows = [(spec, row.site) for spec in specs for row in dealt_rows(spec, read_spec(spec, 0), 0)]
    _chosen(sorted({site for spec, site in rows if site and spec.site in (None, site)}), options.site)


def _chosen(names: Sequence[str], site: str) -> str:
    if site and site not in names:
        raise SettingError(f"the data has no site {site!r}; it has {listed(names) or 'nothing'}.")
    if not site and len(names) > 1:
        raise SettingError(f"the data has the sites {listed(names)}: name this site with --site NAME.")
    return site or names[0]
