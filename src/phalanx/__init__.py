"""Train one PyTorch model together with people you do not trust.

``core`` holds the protocol and its mathematics, free of sockets and clocks; start with ``core/clipping.py``.
"""

from phalanx.core.clipping import Clipped, centered_clip

__all__ = ["Clipped", "__version__", "centered_clip"]
__version__ = "0.1.0"
