"""A bundle: a signed model package for devices. `load_bundle` verifies one; `build_bundle` makes one.

The names below are loaded when first used, so that a module of this room costs no other.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl_protocol.bundle.loading import Bundle, build_bundle, load_bundle, unverified_manifest, verified_again
    from edgefl_protocol.bundle.manifest import BundleFields, Manifest, check_update
    from edgefl_protocol.bundle.model_card import Card, Labels

__all__ = [
    "Bundle",
    "BundleFields",
    "Card",
    "Labels",
    "Manifest",
    "build_bundle",
    "check_update",
    "load_bundle",
    "unverified_manifest",
    "verified_again",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgefl_protocol.bundle import loading

    return getattr(loading, name)


def __dir__() -> list[str]:
    return __all__
