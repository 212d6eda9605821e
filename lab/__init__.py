"""All-reduces on a network of Linux network namespaces, beside the simulator's prediction.

`python -m lab` (as root) runs everything; docs/lab.md describes it.

- `network`: BiGraph and fat tree as values: cables, addresses, routes, paths
- `schedules`: operations of a schedule for each host; bytes of each link and step
- `namespaces`: the network in the kernel, removed again in any case
- `counters`: bytes of each link, retransmissions, processor use
- `ranks`, `worker`: rank processes in the namespaces, and the schedules that they run
- `experiment`: measurements of one network
- `prediction`: the same runs on the simulator
- `report`: tables of results
- `run`, `program`: command line, and its signals and errors
"""
