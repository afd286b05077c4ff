"""``phalanx join`` by somebody whose gradients are wrong from the first one on."""

from __future__ import annotations

from functools import partial

from phalanx import node
from phalanx.attacks.gradients import WrongGradient
from phalanx.cli import main

if __name__ == "__main__":
    node.Settings = partial(node.Settings, attack=WrongGradient())  # type: ignore[misc,assignment]
    main()
