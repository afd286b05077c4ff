"""The protocol: no sockets, clocks, threads or global randomness in it.

To know what a peer does, read ``step``. To check it, read in this order, each file standing on the ones before:
``errors crypto merkle messages codec envelope randomness partition balance clipping wire verification config
membership transcript slowpath effects events peer broadcast justice checking step``. (``gram`` and ``gram_cuda`` are
passes over long rows for ``clipping``.)
"""
