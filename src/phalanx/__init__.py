"""Train one PyTorch model together with people you do not trust.

``core`` holds the protocol and its mathematics, free of sockets and clocks; its docstring says where to start.
"""

from phalanx.core.clipping import Clipped, centered_clip

__all__ = ["Clipped", "__version__", "centered_clip"]
__version__ = "0.1.0"
