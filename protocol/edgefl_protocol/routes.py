"""The coordinator's sealed routes: name, path, and who may call. Source: docs/security.md, routes."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ROLES = ("site", "device")


@dataclass(frozen=True)
class Route:
    """One route that takes an envelope."""

    cty: str  # the header's content type, and the route's name
    path: str  # below the configured public base
    roles: frozenset[str]  # members that may call it; empty where a newcomer may
    in_round: bool = False  # whether the header's `rnd` names a round; 0 elsewhere


_MEMBERS = frozenset(ROLES)
ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        route.cty: route
        for route in (
            Route("enrol", "/v1/enrol", frozenset()),
            Route("enrol-proof", "/v1/enrol/proof", frozenset()),
            Route("task", "/v1/task", _MEMBERS),
            Route("broadcast", "/v1/broadcast", _MEMBERS, in_round=True),
            Route("reply", "/v1/reply", _MEMBERS, in_round=True),
            Route("blob", "/v1/blob", _MEMBERS),
            Route("index", "/v1/index", _MEMBERS),
            Route("bundle", "/v1/bundle", _MEMBERS),
            Route("keys", "/v1/keys", _MEMBERS),
            Route("rotate", "/v1/rotate", _MEMBERS),
        )
    }
)
