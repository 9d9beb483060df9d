"""How a partition is to be made: the scheme and its numbers, checked against one another before any data is read.

Source: docs/methods.md 8.1 to 8.4.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from edgefl_trainer.data.errors import PartitionError
from edgefl_trainer.data.specs import MAX_SITES

Scheme = Literal["natural", "iid", "dirichlet", "pathological", "domain"]
DirichletBy = Literal["class", "site"]
SCHEMES: tuple[str, ...] = get_args(Scheme)

ALPHA = 0.3  # docs/methods.md 5: PEP-FedPT's Dir(0.3)
MAX_ALPHA = 1e6  # beyond, sites differ by rounding only
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "iid": ("sites",),
    "dirichlet": ("sites",),
    "pathological": ("sites", "classes_per_site"),
}
_TAKES: Mapping[str, tuple[str, ...]] = {
    **_NEEDS,
    "natural": (),
    "dirichlet": ("sites", "alpha", "by"),
    "domain": ("sites", "classes_per_site"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A scheme and its numbers; None means not given.

    Attributes:
        scheme: `natural`: the sites of the data; `iid`: lesions dealt evenly; `dirichlet`; `pathological`: a few
            classes a site; `domain`: each site of the data is a domain, cut into equally many sites.
        sites: Number of sites, held-out ones included.
        alpha: Concentration of the Dirichlet distribution.
        by: Dirichlet over sites for each `class`, or over classes for each `site` (sites of equal size).
        classes_per_site: Classes that a site holds.
        holdout_sites: Share of the sites that never train, in [0, 1).
    """

    scheme: Scheme
    sites: int | None = None
    alpha: float | None = None
    by: DirichletBy | None = None
    classes_per_site: int | None = None
    holdout_sites: float = 0.0

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise PartitionError(f"there is no scheme {self.scheme!r}; choose {', '.join(SCHEMES)}.")
        for name in ("sites", "alpha", "by", "classes_per_site"):
            given = getattr(self, name) is not None
            if given and name not in _TAKES[self.scheme]:
                known = " and ".join(map(_flag, _TAKES[self.scheme])) or "no number of its own"
                raise PartitionError(f"scheme {self.scheme} takes {known}: leave {_flag(name)} out.")
            if not given and name in _NEEDS.get(self.scheme, ()):
                raise PartitionError(f"scheme {self.scheme} needs {_flag(name)}: add it.")
        self._check_ranges()

    def _check_ranges(self) -> None:
        whole, number = type(self.sites) is int, type(self.alpha) in (int, float)
        checks = (
            ("sites", self.sites is None or (whole and 1 <= (self.sites or 0) <= MAX_SITES), f"1 to {MAX_SITES}"),
            (
                "alpha",
                self.alpha is None or (number and 0 < (self.alpha or 0) <= MAX_ALPHA),
                f"above 0, to {MAX_ALPHA:g}",
            ),
            ("by", self.by in (None, *get_args(DirichletBy)), "class or site"),
            (
                "classes_per_site",
                self.classes_per_site is None or (type(self.classes_per_site) is int and self.classes_per_site >= 1),
                "1 or more",
            ),
            (
                "holdout_sites",
                type(self.holdout_sites) in (int, float)
                and math.isfinite(self.holdout_sites)
                and 0 <= self.holdout_sites < 1,
                "a share from 0 to below 1",
            ),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise PartitionError(f"{_flag(name)} is {getattr(self, name)!r}; allowed: {allowed}.")

    def to_json(self) -> dict[str, Any]:
        """What was given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _flag(name: str) -> str:
    return "--dirichlet-by" if name == "by" else "--" + name.replace("_", "-")
