"""Harness for the GPU benchmarks with ranks: collectives, fused operators, training, models.

The benchmarks keep cases, sides, data, and what only one of them measures.

- `cases`: a workload, and how the command line selects some
- `runner`: the parent, which starts rank groups until every case has a record
- `rank`: one rank's process, which measures the cases in order
- `context`: a rank's communicator, device and libraries, and agreement between ranks
- `side`: a library or an algorithm, and buffers
- `measure`: sides in turn in one run, and CUDA graphs that are checked and timed
- `records`: result lines, and a side's figures over all ranks
"""
