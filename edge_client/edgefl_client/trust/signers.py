"""Whose bundles count on this device now: signers added by hand, and those of the federation's root set.

    in force = (added by hand, or listed in the root set) and not on the list of revoked keys

A signer that only the root set lists counts for bundles of that federation alone, and a bundle of the federation needs
as many trusted signers as the root set asks for. There is no trust on first use. Source: docs/security.md 2.6.5,
2.6.6 and 2.8, checks 24 and 26.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgefl_client.home import Home
from edgefl_client.trust.trusted_keys import list_trusted
from edgefl_exchange.trust_records import load_revoked, load_root
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import BundleError
from edgefl_protocol.records.root import Root
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_protocol.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class Signers:
    """The signers in force at one moment."""

    keys: tuple[PublicSigningKey, ...]  # all of them
    by_hand: frozenset[str]  # key ids of those that a person added
    revoked: frozenset[str]  # key ids on the federation's list
    root: Root | None  # the federation's root set, or None

    @property
    def public(self) -> list[bytes]:
        """The public keys of all trusted signers, for `load_bundle`."""
        return [key.public for key in self.keys]

    @property
    def key_ids(self) -> frozenset[str]:
        """The key ids of all trusted signers."""
        return frozenset(key.key_id for key in self.keys)

    def all_revoked(self, claimed: Iterable[str]) -> bool:
        """Tell whether a bundle names no signer but revoked ones; whether they signed it does not matter then."""
        names = set(claimed)
        return bool(names) and names <= self.revoked

    def refuse_revoked(self, claimed: Iterable[str]) -> None:
        """Refuse a bundle that names no signer but revoked ones.

        Raises:
            BundleError: code `revoked_signer`.
        """
        names = set(claimed)
        if self.all_revoked(names):
            raise BundleError(
                f"the bundle is signed by {', '.join(sorted(names))}, which the federation has revoked; fetch a newer "
                "one with edgefl sync",
                "revoked_signer",
            )

    def check(self, bundle: "Bundle") -> None:
        """Refuse a bundle whose signers do not suffice.

        Raises:
            BundleError: code `other_federation` or `too_few_signers`.
        """
        root, federation = self.root, bundle.manifest.federation
        if root is None:
            return
        if federation != root.federation and not self.by_hand & set(bundle.signers):
            raise BundleError(
                f"the bundle's signer is trusted for the federation {root.federation} only, but the bundle is for "
                f"{federation or 'no federation'}; if you know that signer, add it with edgefl trust add",
                "other_federation",
            )
        if federation == root.federation and len(bundle.signers) < root.signer_threshold:
            raise BundleError(
                f"{counted(len(bundle.signers), 'trusted key')} signed the bundle, but the federation asks for "
                f"{root.signer_threshold}; ask its publisher for the other signatures",
                "too_few_signers",
            )


def signers_in_force(home: Home, extra: Iterable[bytes] = ()) -> Signers:
    """Return the signers that count on this device now, and `extra`, public keys trusted for this call."""
    root, revoked = load_root(home.member), load_revoked(home.member)
    off = frozenset() if revoked is None else revoked.key_ids
    by_hand = [*(one.key for one in list_trusted(home)), *map(PublicSigningKey, extra)]
    listed = () if root is None else root.signers
    keys = {key.public: key for key in (*by_hand, *listed) if key.key_id not in off}
    return Signers(
        keys=tuple(keys.values()),
        by_hand=frozenset(key.key_id for key in by_hand) - off,
        revoked=off,
        root=root,
    )
