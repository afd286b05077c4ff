"""The protocol: no sockets, clocks, threads or global randomness in it.

To know what a peer does, read ``step``. To check it, read in this order, each file standing on the ones before:
``errors crypto merkle messages codec envelope randomness room partition balance clipping wire verification config
membership transcript slowpath effects events assembly peer broadcast justice checking step``. (``gram`` and
``gram_cuda`` are passes over long rows, ``memory`` is what a peer leaves to its successor after a restart.)
"""
