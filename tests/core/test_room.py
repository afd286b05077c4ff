"""Room for vectors is aligned, of every type, and what a vector frees serves the next one."""

import subprocess
import sys

import pytest
import torch

from phalanx.core.room import make_room, make_room_like


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 1 << 15, (1 << 15) + 1, 1_000_003])
def test_room_is_what_it_is_asked_for(size: int, dtype: torch.dtype) -> None:
    vector = make_room(size, dtype)
    assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((size,), dtype, True)
    assert vector.data_ptr() % 64 == 0
    vector.fill_(3)
    other = make_room_like(vector)
    other.copy_(vector)
    assert torch.equal(other, vector)
    assert (vector == 3).all()


# Prints whether memory is kept, and how many pages came from the system for the vectors after the first ones.
_PROGRAM = """
import resource
from phalanx.core.room import make_room
from phalanx.training.allocation import keep_freed_memory
import torch

kept = keep_freed_memory()
held, faults = [], []
for step in range(12):  # what a step takes, of which some is held for a few steps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held.append([make_room(size, torch.float32).fill_(1) for size in (1 << 22, 1 << 22, 1 << 20, 1 << 20, 1 << 20)])
    make_room(1 << 22, torch.float32).fill_(1)
    del held[:-3]
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, sum(faults[6:]))
"""


def test_vectors_lie_where_others_were() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    if kept != "True":
        pytest.skip("the C library has no such setting")
    assert int(faults) < 1000, "a vector has 4096 pages"
