"""What crosses a boundary: payloads, envelopes, keys, bundles, images. Pure: bytes in, values or errors out."""

from edgefl_protocol.errors import EdgeflError, EnvelopeError, PayloadError
from edgefl_protocol.payload import Payload, digest, state_digest

__all__ = ["EdgeflError", "EnvelopeError", "Payload", "PayloadError", "digest", "state_digest"]
