"""What leaves a site, by kind: the words a method declares, an owner consents to, and a reply's arrays are judged by.

    kind          first words of the arrays' names
    maps          maps.0, maps.7                          rollout maps of a class
    features      features; moments.cls                   of a site's pictures, each or summed up
    prototypes    prototypes.3                            means of features of a class
    logits        outputs.3                               mean answers of the model for a class
    prompts       prompts.b; keys, selections             prompts, and what their groups answer to
    weights       whatever has no name above              of the network, the head, an optimiser

Guarantees: every name has exactly one kind; a name that is not known counts as `weights`, which tell most, so a new
array never leaves by a smaller consent. Source: docs/methods.md, what travels; docs/security.md, exchange policy.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

WEIGHTS: Final = "weights"
_FIRST_WORDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "maps": ("maps",),
        "features": ("features", "moments"),
        "prototypes": ("prototypes",),
        "logits": ("outputs",),
        "prompts": ("prompts", "keys", "selections"),
        WEIGHTS: (),
    }
)
KINDS: Final = tuple(_FIRST_WORDS)  # in the order in which they are told
_KIND_OF: Final = {word: kind for kind, words in _FIRST_WORDS.items() for word in words}


def kind_of(name: str) -> str:
    """Tell the kind of an array by the first word of its name."""
    return _KIND_OF.get(name.partition(".")[0], WEIGHTS)


def travels_of(names: Iterable[str]) -> tuple[str, ...]:
    """Tell the kinds of arrays of these names, in the order of `KINDS`."""
    found = set(map(kind_of, names))
    return tuple(kind for kind in KINDS if kind in found)
