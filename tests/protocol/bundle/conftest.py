"""The committed bundle, opened up so that a test can change one thing and sign it again."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

from edgefl_protocol.bundle import Bundle, BundleFields, load_bundle
from edgefl_protocol.bundle.archive import read_archive, write_archive
from edgefl_protocol.bundle.manifest import (
    SIGNING_LABEL,
    BundleMember,
    Manifest,
    Signature,
    parse_manifest,
    write_signatures,
)
from edgefl_protocol.envelopes.keys import SigningKey
from edgefl_protocol.errors import BundleError

VECTOR = Path(__file__).parents[2] / "vectors" / "bundles" / "format1.edgefl"
OTHER = SigningKey(bytes(range(1, 33)))
THIRD = SigningKey(bytes(range(2, 34)))


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(BundleError) as caught:
        action()
    assert str(caught.value)
    return caught.value.code


def _manifest(fields: BundleFields, members: Mapping[str, bytes]) -> Manifest:
    return Manifest(
        federation=fields.federation,
        line=fields.line,
        task=fields.task,
        version=fields.version,
        created_ms=fields.created_ms,
        expires_ms=fields.expires_ms,
        min_client=fields.min_client,
        min_runtime=fields.min_runtime,
        members=tuple(BundleMember(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in members.items()),
    )


@dataclass(frozen=True)
class GoodBundle:
    """`data` is the committed file; `key` signed it."""

    data: bytes
    key: SigningKey = field(default_factory=lambda: SigningKey(bytes(range(32))))

    @property
    def members(self) -> dict[str, bytes]:
        """The signed members, without manifest and signatures."""
        found = read_archive(self.data)
        return {name: found[name] for name in found if name not in ("manifest.json", "signatures.json")}

    @cached_property
    def manifest(self) -> Manifest:
        return parse_manifest(read_archive(self.data)["manifest.json"])

    @property
    def fields(self) -> BundleFields:
        m = self.manifest
        return BundleFields(
            federation=m.federation,
            line=m.line,
            task=m.task,
            version=m.version,
            created_ms=m.created_ms,
            expires_ms=m.expires_ms,
            min_client=m.min_client,
            min_runtime=m.min_runtime,
        )

    @property
    def now_ms(self) -> int:
        return self.manifest.created_ms

    def load(self, data: bytes | None = None) -> Bundle:
        return load_bundle(self.data if data is None else data, [self.key.public], self.now_ms)

    def signature(self, manifest: bytes, key: SigningKey | None = None) -> Signature:
        key = key or self.key
        return Signature(key.key_id, "ed25519", key.sign(SIGNING_LABEL, manifest))

    def resign(self, changes: Mapping[str, bytes], manifest: bytes | None = None) -> bytes:
        """A correctly signed archive with changed members: what a careless or hostile signer could publish."""
        members = {name: content for name, content in sorted({**self.members, **changes}.items()) if content}
        if manifest is None:
            manifest = _manifest(self.fields, members).to_bytes()
        signatures = write_signatures([self.signature(manifest)])
        return write_archive({"manifest.json": manifest, "signatures.json": signatures, **members})


@pytest.fixture(scope="session")
def good() -> GoodBundle:
    """The committed bundle of format 1."""
    return GoodBundle(VECTOR.read_bytes())
