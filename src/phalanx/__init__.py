"""Train one PyTorch model together with people you do not trust.

    import phalanx

    result = phalanx.simulate("digits", peers=16, byzantine=7, attack="sign_flip", start=50)
    model.load_state_dict(result.model)

``core`` holds the protocol and its mathematics, free of sockets and clocks; its docstring says where to start.
``training`` holds tasks, optimizers and runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.core.clipping import Clipped, centered_clip
from phalanx.core.errors import LocalError, WriteFailed

if TYPE_CHECKING:
    from phalanx.training.simulate import Result, resume, simulate
    from phalanx.training.task import Data, Task, accuracy, classification_loss

__all__ = [
    "Clipped",
    "Data",
    "LocalError",
    "Result",
    "Task",
    "WriteFailed",
    "__version__",
    "accuracy",
    "centered_clip",
    "classification_loss",
    "resume",
    "simulate",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Training takes a while to import: it waits until it is asked for."""
    if name in ("Data", "Task", "accuracy", "classification_loss"):
        from phalanx.training import task

        return getattr(task, name)
    if name in ("Result", "resume", "simulate"):
        from phalanx.training import simulate as training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
