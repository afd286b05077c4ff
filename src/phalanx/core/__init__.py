"""The protocol, without sockets, clocks or global randomness.

Reading order: ``errors``, ``crypto``, ``merkle``, ``messages``, ``codec``, ``envelope``, ``randomness``; then the
mathematics, ``clipping`` (the equation and its solver) and ``gram`` (passes over long rows; ``gram_cuda`` on a GPU).
"""
