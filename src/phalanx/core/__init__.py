"""The protocol, without sockets, clocks or global randomness.

Reading order: ``errors``, ``crypto``, ``merkle``, ``messages``, ``codec``, ``envelope``, ``randomness``, ``partition``;
then aggregation: ``balance`` (the mathematics), ``clipping`` (the function that peers call), ``gram`` and ``gram_cuda``
(passes over long rows).
"""
