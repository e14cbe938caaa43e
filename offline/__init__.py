"""Learning from logged data: datasets, behaviour data, behaviour cloning, CQL and IQL.

`offline.datasets` is the record, `offline.files` reads and writes it (D4RL's HDF5 and Minari),
`offline.collect` makes it with any policy in any environment, and `offline.algorithms` learns from it
through d3rlpy. This package may import `llmgym`, `agents`, d3rlpy, h5py and minari; neither `llmgym` nor
`agents` imports it.
"""
