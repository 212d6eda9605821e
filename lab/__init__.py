"""All-reduces on a network made from Linux network namespaces, beside the simulator's prediction.

`python -m lab` (as root) runs everything; docs/lab.md describes it.

- `network`: BiGraph and fat tree as values: cables, addresses, routes, paths
- `schedules`: a schedule's operations by host; bytes by link and step
- `namespaces`: the network in the kernel, removed again in any case
- `counters`: bytes by link, retransmissions, processor use
- `ranks`, `worker`: rank processes in the namespaces, and the schedules that they run
- `experiment`: measurements on one network
- `prediction`: the same runs on the simulator
- `report`: result tables
- `run`, `program`: command line, and its signals and errors
"""
