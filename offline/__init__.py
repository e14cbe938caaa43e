"""Learning from logged data: datasets, behaviour cloning, CQL, IQL and offline evaluation.

What belongs in this package: reading D4RL HDF5 files, Minari datasets and llmgym's own run logs
into plain arrays; collecting behaviour data from any agent; training through d3rlpy and a discrete
IQL for answer pools; and judging the result against the known optimum. It may import `llmgym`,
`agents`, d3rlpy, h5py and minari; neither `llmgym` nor `agents` imports it.
"""
