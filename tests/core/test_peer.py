"""What a peer holds of its own work, and of long bytes that come in chunks."""

import torch

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.envelope import Examiner
from phalanx.core.membership import make_genesis
from phalanx.core.messages import MAX_CHUNK
from phalanx.core.partition import BLOCK, compute_part_sizes, split_parts
from phalanx.core.peer import Own, Peer
from phalanx.core.wire import WIRE_TYPES, encode_tensor
from phalanx.network.ideal import make_signers

SIZE = 4 * (MAX_CHUNK // 4 + 2 * BLOCK)  # parts of four peers take two chunks
SIGNERS, VERIFY = make_signers(4, 1, ideal=True)
CONFIG = Config(
    founders=tuple(signer.key for signer in SIGNERS), byzantine=1, size=SIZE, steps=10, state=bytes(32)
).check()
GRADIENT = torch.linspace(-1, 1, SIZE)


def make_peer() -> Peer:
    view = make_genesis(CONFIG)
    return Peer(CONFIG, SIGNERS[0].key, Examiner(VERIFY), view, lambda *_: view)


def test_my_own_gradient_is_found_in_its_parts() -> None:
    peer = make_peer()
    peer.own[0] = Own(seed=b"mine", tensors={0: split_parts(GRADIENT, 4)})
    peer.gradients[0, b"another's"] = -GRADIENT
    for seed, expected in ((b"mine", GRADIENT), (b"another's", -GRADIENT)):
        found = peer.find_gradient(0, seed)
        assert found is not None
        assert torch.equal(found, expected)
    assert peer.find_gradient(0, b"nobody's") is None
    assert peer.find_gradient(1, b"mine") is None


def test_the_bytes_of_long_parts_are_those_of_their_tensors() -> None:
    parts = split_parts(GRADIENT, 4)
    for part, data in zip(parts, WIRE_TYPES["float32"].encode_parts(parts), strict=True):
        assert data == encode_tensor(part)
        assert torch.frombuffer(data, dtype=torch.float32).data_ptr() == part.data_ptr()
    parts[0] += 1
    assert not torch.equal(parts[0][:1], GRADIENT[:1])  # cut from it, not into it


def test_chunks_are_put_together_whatever_their_order() -> None:
    peer, part = make_peer(), 1
    size = 4 * compute_part_sizes(SIZE, 4)[part]
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    chunks = [m.AggregateChunk(0, 0, part, size, at, data[at : at + MAX_CHUNK]) for at in range(0, size, MAX_CHUNK)]
    assert len(chunks) == 2
    for chunk in reversed(chunks):
        assert (0, 0, part) not in peer.aggregates
        peer.store_aggregate(SIGNERS[part].key, chunk)
    assert peer.aggregates[0, 0, part] == data
    assert not peer.partial
