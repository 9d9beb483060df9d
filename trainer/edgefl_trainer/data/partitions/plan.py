"""How a partition is to be made: the scheme and its numbers, checked against one another before any data is read.

Source: docs/methods.md 8.1 to 8.4.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from edgefl_trainer.data.errors import PartitionError
from edgefl_trainer.data.specs import MAX_SITES
from edgefl_trainer.typed_values import allowed, fits, hints

Scheme = Literal["natural", "iid", "dirichlet", "pathological", "domain"]
DirichletBy = Literal["class", "site"]
SCHEMES: tuple[str, ...] = get_args(Scheme)

ALPHA = 0.3  # docs/methods.md 5: PEP-FedPT's Dir(0.3)
MAX_ALPHA = 1e6  # beyond, sites differ by rounding only

Sites = Annotated[int, Meta(ge=1, le=MAX_SITES, description=f"1 to {MAX_SITES}")]
Alpha = Annotated[float, Meta(gt=0, le=MAX_ALPHA, description=f"above 0, at most {MAX_ALPHA:g}")]
ClassesPerSite = Annotated[int, Meta(ge=1, description="1 or more")]
HoldoutShare = Annotated[float, Meta(ge=0, lt=1, description="a share from 0 to below 1")]
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "iid": ("sites",),
    "dirichlet": ("sites",),
    "pathological": ("sites", "classes_per_site"),
}
_TAKES: Mapping[str, tuple[str, ...]] = {
    **_NEEDS,
    "natural": (),
    "iid": ("sites", "whole"),
    "dirichlet": ("sites", "alpha", "by", "whole"),
    "pathological": ("sites", "classes_per_site", "whole"),
    "domain": ("sites", "classes_per_site"),
}


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """A scheme and its numbers; None means not given.

    `natural`: the sites of the data; `iid`: lesions dealt evenly; `dirichlet`; `pathological`: a few classes a site;
    `domain`: each site of the data is a domain, cut into equally many sites.
    """

    scheme: Scheme
    sites: Sites | None = None  # held-out ones included
    alpha: Alpha | None = None  # concentration of the Dirichlet distribution
    by: DirichletBy | None = (
        None  # Dirichlet over sites for each `class`, or over classes for each `site` (equal sizes)
    )
    classes_per_site: ClassesPerSite | None = None
    whole: tuple[str, ...] | None = None  # sites of the data that stay as they are; the scheme deals the others
    holdout_sites: HoldoutShare = 0.0  # share of the sites that never train
    hold_out: tuple[str, ...] | None = None  # sites that never train, by name, in place of a share

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise PartitionError(f"there is no scheme {self.scheme!r}; choose one of {', '.join(SCHEMES)}.")
        for name in ("sites", "alpha", "by", "classes_per_site", "whole"):
            given = getattr(self, name) is not None
            if given and name not in _TAKES[self.scheme]:
                known = " and ".join(map(_flag, _TAKES[self.scheme])) or "no number of its own"
                raise PartitionError(f"scheme {self.scheme} takes {known}: leave {_flag(name)} out.")
            if not given and name in _NEEDS.get(self.scheme, ()):
                raise PartitionError(f"scheme {self.scheme} needs {_flag(name)}: add it.")
        for name, wanted in hints(PartitionPlan).items():
            value = getattr(self, name)
            if not fits(value, wanted):
                raise PartitionError(f"{_flag(name)} is {value!r}; allowed: {allowed(wanted, value)}.")

        if self.hold_out is not None:
            object.__setattr__(self, "hold_out", tuple(sorted(set(self.hold_out))))
            if not self.hold_out or self.holdout_sites:
                raise PartitionError("--hold-out names one site or more, in place of --holdout-sites.")
        if self.whole is None:
            return
        object.__setattr__(self, "whole", tuple(sorted(set(self.whole))))  # of TOML and JSON it is a list
        if not self.whole:
            raise PartitionError("--whole names no site: leave it out.")
        if self.dealt < 1:
            raise PartitionError(
                f"--sites {self.sites} counts those of --whole, too, and leaves none to deal: give --sites "
                f"{len(self.whole) + 1} or more."
            )

    @property
    def dealt(self) -> int:
        """Number of sites that the scheme deals."""
        return (self.sites or 0) - len(self.whole or ())

    def to_json(self) -> dict[str, Any]:
        """Return what was given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _flag(name: str) -> str:
    return "--dirichlet-by" if name == "by" else "--" + name.replace("_", "-")
