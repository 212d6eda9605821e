"""Soft-RoCE laboratory: RDMA between guests without RDMA hardware, root or virtualization.

A guest is a user-mode Linux kernel (see https://docs.kernel.org/virt/uml/): a host process with two
NICs, each with an rxe device (RoCEv2 in software). It runs the host's programs. docs/rdma-lab.md
describes it.

- `guests`: a group of guests, and commands that run in them at once
- `guest`: one guest: process, NICs, consoles; `init.sh`: its setup
- `switch`: guest networks, with lost and delayed frames
- `ranks`: ranks in a Rust test, one in each guest
- `reaper`: guests end with the lab's process, however it dies
- `kernel`: the guests' kernel, built once and cached; `kernel.config`: its options
- `packages`: Debian packages that the lab needs
- `check`: devices and a ping-pong between two guests
- `fabric`: `weft-bench-fabric` ranks, one in each of two guests
- `bench`: Weft transfers beside perftest, UCX and libfabric
- `peers`: UCX and libfabric, where their programs are installed
- `soak`: counted writes over links that lose frames, checked byte for byte
- `run`: command line
"""
