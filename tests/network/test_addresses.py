"""Addresses: what is one, what is not, and which of them a book keeps."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError
from phalanx.network.addresses import (
    MAX_KEYS,
    MAX_PER_KEY,
    Book,
    decode_page,
    encode_page,
    encode_place,
    format_place,
    is_loopback,
    parse_address,
)

ALICE, BOB = Identity(bytes(range(32))), Identity(bytes(range(32, 64)))


def address_of(peer: Identity, port: int) -> str:
    return f"/ip4/203.0.113.5/tcp/{port}/p2p/{peer.peer_id}"


# ---- Multiaddrs


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("/ip4/127.0.0.1/tcp/4001", "047f000001060fa1"),
        ("/ip6/::1/tcp/65535", "29" + "00" * 15 + "0106ffff"),
        ("/dns4/example.org/tcp/443", "360b6578616d706c652e6f72670601bb"),
        ("/ip4/1.2.3.4/udp/4001/quic-v1", "0401020304910" + "20fa1cd03"),
    ],
)
def test_places_have_the_bytes_of_libp2p(text: str, encoded: str) -> None:
    assert encode_place(text).hex() == encoded
    assert format_place(bytes.fromhex(encoded)) == text


def test_an_address_names_its_peer() -> None:
    address = parse_address(address_of(ALICE, 4001))
    assert address.key == ALICE.key
    assert format_place(address.place) == "/ip4/203.0.113.5/tcp/4001"


def test_an_address_may_lead_through_a_relay() -> None:
    text = f"{address_of(BOB, 4001)}/p2p-circuit/p2p/{ALICE.peer_id}"
    address = parse_address(text)
    assert address.key == ALICE.key
    assert format_place(address.place) == text.removesuffix(f"/p2p/{ALICE.peer_id}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "/ip4/203.0.113.5/tcp/4001",
        f"/p2p/{ALICE.peer_id[:-1]}",
        f"ip4/203.0.113.5/tcp/4001/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{ALICE.peer_id}/",
        f"/ip4/203.0.113.256/tcp/4001/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp/65536/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp/-1/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp//p2p/{ALICE.peer_id}",
        "/ip4/203.0.113.5/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        f"/unix/etc/passwd/p2p/{ALICE.peer_id}",
        f"/dns4/-example.org/tcp/1/p2p/{ALICE.peer_id}",
        f"/dns4/{'a' * 300}/tcp/1/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp/٣/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp/4001\n/p2p/{ALICE.peer_id}",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(LocalError):
        parse_address(text)


@pytest.mark.parametrize("data", ["04", "047f0000", "9003", "350161ff", "3501", "06", "ff" * 9, "3502610a"])
def test_damaged_bytes_of_a_place_are_refused(data: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        format_place(bytes.fromhex(data))


def test_loopback_is_recognised() -> None:
    assert is_loopback("/ip4/127.0.0.1/tcp/0")
    assert is_loopback("/ip6/::1/tcp/0")
    assert not is_loopback("/ip4/0.0.0.0/tcp/0")
    assert not is_loopback("/dns4/localhost/tcp/0")


# ---- The book


def test_a_book_keeps_a_few_addresses_of_a_key_the_newest_first() -> None:
    book = Book()
    for port in range(1, 10):
        book.add(parse_address(address_of(ALICE, port)))
    ports = [address.text.split("/")[4] for address in book.get(ALICE.key)]
    assert ports == ["9", "8", "7", "6"]
    assert len(ports) == MAX_PER_KEY


def test_hearsay_never_pushes_out_what_a_peer_says_of_itself() -> None:
    book = Book()
    book.add(parse_address(address_of(ALICE, 1)))
    for port in range(2, 10):
        book.add_hearsay(parse_address(address_of(ALICE, port)))
    assert len(book.get(ALICE.key)) == MAX_PER_KEY
    assert book.get(ALICE.key)[0].text == address_of(ALICE, 1)
    for port in range(20, 23):
        book.add(parse_address(address_of(ALICE, port)))
    assert {address.text for address in book.get(ALICE.key)} == {address_of(ALICE, port) for port in (1, 20, 21, 22)}


def test_hearsay_that_led_nowhere_makes_room() -> None:
    book = Book()
    for port in range(1, 5):
        book.add_hearsay(parse_address(address_of(ALICE, port)))
    book.forget_hearsay(ALICE.key)
    book.add_hearsay(parse_address(address_of(ALICE, 9)))
    assert [address.text for address in book.get(ALICE.key)] == [address_of(ALICE, 9)]


def test_a_book_holds_so_many_keys_and_members_stay() -> None:
    book, members = Book(), frozenset({ALICE.key})
    book.add(parse_address(address_of(ALICE, 1)), members)
    for number in range(2 * MAX_KEYS):
        peer = Identity(number.to_bytes(32, "big"))
        book.add(parse_address(address_of(peer, 1)), members)
        book.add_hearsay(parse_address(address_of(Identity((10000 + number).to_bytes(32, "big")), 1)))
    assert len(book.keys()) <= 2 * MAX_KEYS
    assert book.get(ALICE.key)


def test_a_page_leaves_out_what_is_no_address() -> None:
    good = address_of(ALICE, 1)
    assert [address.text for address in decode_page(encode_page([good, "/nonsense", good[:-1]]))] == [good]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1]), b"\x91\xa1\xff"]
)
def test_a_damaged_page_is_empty(data: bytes) -> None:
    assert decode_page(data) == []


def test_a_book_is_sure_of_what_is_more_than_hearsay() -> None:
    book = Book()
    book.add_hearsay(parse_address(address_of(ALICE, 1)))
    assert not book.is_sure_of(ALICE.key)
    book.add(parse_address(address_of(ALICE, 2)))
    assert book.is_sure_of(ALICE.key)
