"""One identity: the libp2p daemon that is started with our key file is the peer that our key names."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phalanx.core.crypto import Identity, format_peer_id, parse_peer_id

with warnings.catch_warnings():
    # hivemind compiles a function with torch.jit.script when it is imported, which torch deprecates.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.jit\.")
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
    from hivemind.utils.multiaddr import Multiaddr

# hivemind looks for its daemon with a function of importlib.resources that Python 3.11 and 3.12 deprecate.
pytestmark = pytest.mark.filterwarnings(r"ignore:path is deprecated:DeprecationWarning:hivemind\.p2p\.p2p_daemon")

ALICE, BOB = Identity(bytes(range(32))), Identity(bytes(range(32, 64)))


@asynccontextmanager
async def daemon(path: Path, peers: Sequence[str] = ()) -> AsyncIterator[P2P]:
    """A libp2p daemon on the loopback that uses the key in ``path``."""
    p2p = await P2P.create(
        identity_path=str(path),
        initial_peers=list(peers),
        check_if_identity_free=False,  # this check reads RSA keys only
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
    )
    try:
        yield p2p
    finally:
        await p2p.shutdown()
        assert p2p._child.returncode is not None
        p2p._child._transport.close()  # or its pipe may outlive the event loop
        await asyncio.sleep(0)


def save(identity: Identity, path: Path) -> Path:
    identity.save(path)
    return path


def test_the_daemon_has_the_peer_id_of_our_key(tmp_path: Path) -> None:
    async def ask(path: Path) -> PeerID:
        async with daemon(path) as p2p:
            return p2p.peer_id

    fresh = Identity.generate()
    for index, identity in enumerate((ALICE, fresh)):
        path = save(identity, tmp_path / f"{index}.key")
        before = path.read_bytes()
        peer_id = asyncio.run(ask(path))
        assert peer_id.to_base58() == identity.peer_id
        assert parse_peer_id(peer_id.to_base58()) == identity.key
        assert path.read_bytes() == before


def test_daemons_know_each_other_by_our_keys(tmp_path: Path) -> None:
    """Daemons that connect prove their keys to each other."""

    async def meet() -> list[set[str]]:
        async with daemon(save(ALICE, tmp_path / "alice.key")) as alice:
            (address, *_) = await alice.get_visible_maddrs()
            assert str(address).endswith(ALICE.peer_id)
            async with daemon(save(BOB, tmp_path / "bob.key"), [str(address)]) as bob:
                await alice.wait_for_at_least_n_peers(1)
                return [{str(info.peer_id) for info in await p2p.list_peers()} for p2p in (alice, bob)]

    by_alice, by_bob = asyncio.run(meet())
    assert by_alice == {BOB.peer_id}
    assert by_bob == {ALICE.peer_id}


def test_nobody_answers_to_the_name_of_another_key(tmp_path: Path) -> None:
    async def dial() -> None:
        async with daemon(save(ALICE, tmp_path / "alice.key")) as alice, daemon(save(BOB, tmp_path / "bob.key")) as bob:
            (address, *_) = await alice.get_visible_maddrs()
            place = Multiaddr(str(address).removesuffix(f"/p2p/{ALICE.peer_id}"))
            with pytest.raises(ControlFailure):
                await bob._client.connect(PeerID.from_base58(Identity.generate().peer_id), [place])
            await bob._client.connect(PeerID.from_base58(ALICE.peer_id), [place])

    asyncio.run(dial())


@pytest.mark.parametrize("seed", [bytes(32), bytes(range(32)), b"\xff" * 32], ids=bytes.hex)
def test_peer_ids_are_hiveminds(seed: bytes) -> None:
    key = Identity(seed).key
    assert format_peer_id(key) == PeerID(bytes.fromhex("002408011220") + key).to_base58()
    assert parse_peer_id(str(PeerID.from_base58(format_peer_id(key)))) == key
