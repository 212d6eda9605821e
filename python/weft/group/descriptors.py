"""Region descriptors: grants as bytes, which travel over any channel.

A descriptor has the magic, version, owner's rank and number of peers, then for each peer the rank,
the length and the grant, and a tag: HMAC-SHA256 (RFC 2104) with a key that the group's members
share, or SHA-256 between the two members of a pair. All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Final

from weft.base.errors import MalformedError, UnknownError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weft import _native

__all__ = ["decode", "encode"]

_MAGIC: Final = b"WeftRegion\x01"
#: Owner and number of peers.
_HEADER: Final = struct.Struct("<II")
#: Peer and length of the grant.
_PEER: Final = struct.Struct("<II")
_TAG_BYTES: Final = 32


def encode(
    group: _native.Communicator, region: _native.Region, peers: Iterable[int], timeout: float
) -> bytes:
    """Descriptor with a grant for each of `peers`, which are in the group and not this rank."""
    grants = [(peer, group.grant_region(region, peer, timeout)) for peer in peers]
    parts = [_MAGIC, _HEADER.pack(group.rank, len(grants))]
    for peer, grant in grants:
        parts += [_PEER.pack(peer, len(grant)), grant]
    body = b"".join(parts)
    return body + _tag(group, body)


def decode(group: _native.Communicator, descriptor: bytes) -> tuple[int, bytes]:
    """Owner, and the grant for this rank.

    Raises:
        MalformedError: if it is damaged or from another group, or from the group before `reform`.
        UnknownError: if it is this rank's own, or has no grant for this rank.
    """
    body, tag = descriptor[:-_TAG_BYTES], descriptor[-_TAG_BYTES:]
    is_known = hmac.compare_digest(tag, _tag(group, body)) and body.startswith(_MAGIC)
    try:
        owner, grants = _grants(body) if is_known else (0, {})
    except struct.error:
        is_known = False
    if not is_known:
        raise MalformedError(
            f"region descriptor of {len(descriptor)} bytes: damaged, from another group, or from "
            "before `reform`; pass the bytes of `Region.descriptor` in this group"
        )
    if group.rank not in grants:
        whose = "its own" if owner == group.rank else f"of rank {owner}, for ranks {list(grants)}"
        raise UnknownError(
            f"region descriptor at rank {group.rank}, {whose}: expected one for this rank; name it "
            "in `peers`"
        )
    return owner, grants[group.rank]


def _grants(body: bytes) -> tuple[int, dict[int, bytes]]:
    """Owner, and the grants by peer."""
    at = len(_MAGIC)
    owner, count = _HEADER.unpack_from(body, at)
    at += _HEADER.size
    grants = {}
    for _ in range(count):
        peer, length = _PEER.unpack_from(body, at)
        at += _PEER.size
        grants[peer] = body[at : at + length]
        at += length
    return owner, grants


def _tag(group: _native.Communicator, body: bytes) -> bytes:
    key = group.derive_key("region descriptor")
    if key is None:
        return hashlib.sha256(body).digest()
    return hmac.digest(key, body, "sha256")
