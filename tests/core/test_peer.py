"""What a peer holds of its own work, and of long bytes that come in chunks."""

import torch
from msgspec import structs

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.effects import Begin, Delivery, Finished
from phalanx.core.envelope import Examiner
from phalanx.core.handlers import HANDLERS
from phalanx.core.membership import View, make_genesis
from phalanx.core.messages import MAX_CHUNK
from phalanx.core.partition import BLOCK, compute_part_sizes, join_parts, split_parts
from phalanx.core.peer import Own, Peer
from phalanx.core.step import prepare_parts
from phalanx.core.verification import prepare_gradient
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
    return Peer(CONFIG, SIGNERS[0].key, Examiner(VERIFY), view, lambda *_: view, HANDLERS)


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


def test_what_was_made_from_an_undone_state_is_not_used_again() -> None:
    """The step before is taken back and ends otherwise: the batch is another, and so is the state."""

    def prepare(view: View, gradient: torch.Tensor) -> torch.Tensor:
        peer.enter(view)
        peer.contributes = True
        story, value = prepare_parts(peer), None
        try:
            while True:
                effect = story.send(value)
                value = 1 if isinstance(effect, Begin) else Delivery(0.0, None, Finished(1, gradient))
        except StopIteration as end:
            return join_parts(end.value.tensors[view.attempt])

    peer = make_peer()
    first = structs.replace(peer.view, step=1, randomness=bytes(32))
    again = structs.replace(first, attempt=1, height=7, randomness=bytes([1] * 32))
    later = structs.replace(again, attempt=2, height=16)
    short = prepare_gradient(GRADIENT, CONFIG.cap, peer.wire)
    assert torch.equal(prepare(first, GRADIENT), short)
    assert torch.equal(prepare(again, -GRADIENT), -short)
    assert torch.equal(prepare(later, torch.zeros(SIZE)), -short), "one step, one gradient"


def test_gradients_at_a_state_that_was_wrong_are_forgotten() -> None:
    peer = make_peer()
    peer.own[0] = Own(seed=b"mine", tensors={0: split_parts(GRADIENT, 4)})
    peer.gradients[0, b"another's"] = GRADIENT
    peer.forget_gradients()
    assert peer.find_gradient(0, b"mine") is None
    assert peer.find_gradient(0, b"another's") is None
