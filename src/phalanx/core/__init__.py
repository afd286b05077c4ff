"""The protocol: no sockets, clocks, threads or global randomness in it.

To know what a peer does, read ``step``. To check it, read in this order, each file standing on the ones before:
``errors crypto merkle messages codec envelope randomness room partition balance clipping wire verification config
membership transcript slowpath certificates effects events assembly peer handlers broadcast justice checking opening
conclusion step life``. (``gram`` and ``gram_cuda`` are passes over long rows, ``memory`` is what a peer leaves to its
successor after a restart.)
"""
