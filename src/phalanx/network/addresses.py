"""Where peers may be found: multiaddrs, and the book of those that a peer knows.

An address is a hint and nothing more: who answers there proves its key to the daemon. So hearsay can cost an attempt to
connect, and never lead to the wrong peer. Only the few protocols below are understood; everything else is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

import base58
import msgspec

from phalanx.core.crypto import format_peer_id, parse_peer_id
from phalanx.core.errors import LocalError

MAX_ADDRESS = 256
MAX_PER_KEY = 4
MAX_KEYS = 256

_IP4, _TCP, _IP6, _UDP, _UNIX, _P2P = 4, 6, 41, 273, 400, 421
_CODES = {
    "ip4": _IP4,
    "tcp": _TCP,
    "ip6": _IP6,
    "dns": 53,
    "dns4": 54,
    "dns6": 55,
    "dnsaddr": 56,
    "udp": _UDP,
    "p2p-circuit": 290,
    "p2p": _P2P,
    "quic": 460,
    "quic-v1": 461,
    "ws": 477,
    "wss": 478,
}
_NAMES = {code: name for name, code in _CODES.items()}
_BARE = frozenset({"p2p-circuit", "quic", "quic-v1", "ws", "wss"})
_SIZES = {_IP4: 4, _IP6: 16, _TCP: 2, _UDP: 2}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_MAX_PEER_ID = 64  # characters; decoding base58 takes time with the square of them


# ---- Multiaddrs


@dataclass(frozen=True, slots=True)
class Address:
    """A peer, and a place where it may be found."""

    text: str
    key: bytes
    place: bytes
    """The address without the peer, as the daemon takes it."""


def parse_address(text: str) -> Address:
    """Read ``/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW...``; :class:`LocalError` if it is nothing like that."""
    place, mark, peer_id = text.rpartition("/p2p/")
    if not mark or len(text) > MAX_ADDRESS:
        raise LocalError(f"{text[:80]!r} is not the address of a peer; expected /ip4/1.2.3.4/tcp/4001/p2p/12D3KooW...")
    return Address(text, parse_peer_id(peer_id), encode_place(place))


def encode_place(text: str) -> bytes:
    """A multiaddr in bytes, or :class:`LocalError`."""
    words = iter(text.split("/")[1:])
    encoded = bytearray()
    try:
        if not text.startswith("/"):
            raise ValueError
        for name in words:
            encoded += _encode_varint(_CODES[name])
            if name not in _BARE:
                encoded += _encode_value(_CODES[name], next(words))
    except (KeyError, ValueError, StopIteration):
        raise LocalError(
            f"{text[:80]!r} is not an address that is understood here; expected something like /ip4/1.2.3.4/tcp/4001"
        ) from None
    return bytes(encoded)


def encode_unix_path(path: str) -> bytes:
    """The multiaddr of a unix socket."""
    raw = path.encode()
    return _encode_varint(_UNIX) + _encode_varint(len(raw)) + raw


def format_place(data: bytes) -> str:
    """A multiaddr in words; ValueError if it holds a protocol that is not understood here."""
    words: list[str] = []
    offset = 0
    while offset < len(data):
        code, offset = _decode_varint(data, offset)
        if code not in _NAMES:
            raise ValueError(f"protocol {code}")
        words.append(_NAMES[code])
        if words[-1] in _BARE:
            continue
        size = _SIZES.get(code)
        if size is None:
            size, offset = _decode_varint(data, offset)
        value = data[offset : offset + size]
        offset += size
        if len(value) != size:
            raise ValueError("cut short")
        words.append(_format_value(code, value))
    return "".join(f"/{word}" for word in words)


def is_loopback(text: str) -> bool:
    """Whether an address only makes sense on this machine."""
    match = re.match(r"/ip[46]/([^/]+)", text)
    try:
        return match is not None and ipaddress.ip_address(match[1]).is_loopback
    except ValueError:
        return False


def find_host(place: bytes) -> str:
    """The host in a connection's far address; of IPv6 the first 64 bits, since who has one of those has all.

    Those who come through one relay share the relay's host.
    """
    try:
        match = re.match(r"/ip[46]/([^/]+)", format_place(place))
        address = ipaddress.ip_address(match[1]) if match is not None else None
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address) if address is not None else ""


def _encode_value(code: int, text: str) -> bytes:
    if code == _IP4:
        return ipaddress.IPv4Address(text).packed
    if code == _IP6:
        return ipaddress.IPv6Address(text).packed
    if code in (_TCP, _UDP):
        if not (text.isascii() and text.isdigit() and len(text) <= 5):
            raise ValueError
        return int(text).to_bytes(2, "big") if int(text) < 1 << 16 else _refuse()
    raw = _decode_peer_id(text) if code == _P2P else text.encode() if _HOST.fullmatch(text) else _refuse()
    return _encode_varint(len(raw)) + raw


def _decode_peer_id(text: str) -> bytes:
    """Any peer's id, of whatever kind of key: that of a relay need not be one of ours."""
    raw: bytes = base58.b58decode(text) if 0 < len(text) <= _MAX_PEER_ID else _refuse()
    return raw


def _refuse() -> bytes:
    raise ValueError


def _format_value(code: int, value: bytes) -> str:
    if code == _IP4:
        return str(ipaddress.IPv4Address(value))
    if code == _IP6:
        return str(ipaddress.IPv6Address(value))
    if code in (_TCP, _UDP):
        return str(int.from_bytes(value, "big"))
    if code == _P2P:
        return base58.b58encode(value).decode()
    text = value.decode("ascii")
    if not _HOST.fullmatch(text):
        raise ValueError("not a host's name")
    return text


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _decode_varint(data: bytes, offset: int) -> tuple[int, int]:
    number = shift = 0
    while offset < len(data) and shift < 63:
        byte = data[offset]
        offset += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, offset
    raise ValueError("cut short")


# ---- The book


class Book:
    """Addresses by key: a few for each, for a few hundred keys.

    What a peer says of itself, and what our user gave us, is kept. Hearsay only fills free places, and is forgotten
    when nobody answered there: a liar cannot push out what is right.
    """

    def __init__(self) -> None:
        self._own: dict[bytes, dict[str, Address]] = {}
        self._hearsay: dict[bytes, dict[str, Address]] = {}

    def add(self, address: Address, keep: frozenset[bytes] = frozenset()) -> None:
        """Add what its owner or our user says. The newest is tried first; keys in ``keep`` are not crowded out."""
        known = self._own.pop(address.key, {})
        known.pop(address.text, None)
        self._own[address.key] = {address.text: address} | known
        while len(self._own[address.key]) > MAX_PER_KEY:
            self._own[address.key].popitem()
        if len(self._own) > MAX_KEYS:
            oldest = next((key for key in self._own if key not in keep), next(iter(self._own)))
            del self._own[oldest]
        self._trim_hearsay(address.key)

    def add_hearsay(self, address: Address) -> None:
        """Add what somebody says of somebody else."""
        own = self._own.get(address.key, {})
        known = self._hearsay.get(address.key, {})
        is_known = address.text in own or address.text in known
        is_full = len(own) + len(known) >= MAX_PER_KEY
        if is_known or is_full or (not known and len(self._hearsay) >= MAX_KEYS):
            return
        self._hearsay.setdefault(address.key, {})[address.text] = address

    def _trim_hearsay(self, key: bytes) -> None:
        known = self._hearsay.get(key, {})
        own = self._own.get(key, {})
        for text in own:
            known.pop(text, None)
        while known and len(own) + len(known) > MAX_PER_KEY:
            known.popitem()

    def forget_hearsay(self, key: bytes) -> None:
        """Nobody answered at any address of this key: make room for what others say now."""
        self._hearsay.pop(key, None)

    def is_sure_of(self, key: bytes) -> bool:
        """Whether there is more than hearsay about a key."""
        return key in self._own

    def get(self, key: bytes) -> tuple[Address, ...]:
        return (*self._own.get(key, {}).values(), *self._hearsay.get(key, {}).values())

    def keys(self) -> frozenset[bytes]:
        return frozenset((*self._own, *self._hearsay))

    def list_for(self, keys: Iterable[bytes]) -> list[str]:
        """What to tell others about these keys."""
        return [address.text for key in list(keys)[:MAX_KEYS] for address in self.get(key)[:MAX_PER_KEY]]


_Page = list[str]
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Page] = msgspec.msgpack.Decoder(_Page)

MAX_PAGE = MAX_KEYS * MAX_PER_KEY * (MAX_ADDRESS + 3) + 5


def encode_page(addresses: Iterable[str]) -> bytes:
    """Addresses as peers tell them to one another."""
    return _encoder.encode(list(addresses))


def decode_page(data: bytes, most: int = MAX_KEYS * MAX_PER_KEY) -> list[Address]:
    """The addresses among the first ``most`` things that somebody told us; what is none is left out."""
    try:
        texts = _decoder.decode(data) if len(data) <= MAX_PAGE else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    addresses: list[Address] = []
    for text in texts[:most]:
        try:
            addresses.append(parse_address(text))
        except LocalError:
            continue
    return addresses


def name_peer(key: bytes) -> str:
    """A key as a log shows it."""
    return f"...{format_peer_id(key)[-8:]}"
