"""Two kinds of things go wrong: ours and theirs. Anything else is a bug."""

from __future__ import annotations


class LocalError(Exception):
    """Something on this machine, or something its user asked for, is wrong. The message says what to do."""


class RunHalted(Exception):  # noqa: N818
    """A simulated run waits for members that will not come. What it wrote before is still there."""


class Malformed(Exception):  # noqa: N818
    """Bytes from a peer are not exactly one message of ours: outside the schema, its limits or its canonical form.

    The decoder raises nothing else. If the bytes carry a valid signature, they are proof for rule E4.
    """


class WriteFailed(Exception):  # noqa: N818
    """The disk did not take something. What was written before is still there."""
