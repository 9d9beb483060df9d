"""What a site that was shut out leaves behind in a server's state: nothing that came from it alone.

What was averaged cannot be taken back; what a method keeps site by site (maps, features, outputs, prompts) can. Which
entries those are the method declares (`Declaration.site_of`). Source: docs/security.md 4.
"""

from collections.abc import Collection, Mapping
from typing import TypeVar

from edgefl_trainer.contract import Method, State, declared

Entry = TypeVar("Entry")


def without_sites(method: Method, state: State, gone: Collection[str]) -> State:
    """Drop the entries of a server's state that came from sites of these names."""
    site_of = declared(method).site_of
    if site_of is None or not gone:
        return state

    def kept(entries: Mapping[str, Entry]) -> dict[str, Entry]:
        return {name: value for name, value in entries.items() if site_of(name) not in gone}

    return State(kept(state.arrays), kept(state.values))
