// Device headers of kernels that store to peers' memory.
//
// - ptx.cuh: instructions that CUDA C++ has no name for
// - table.cuh: where a domain's kernels find everything
// - order.cuh: fences by name, and the release of many flags
// - wait.cuh: bounded waits, and the records of those that failed
// - team.cuh: warps of a block that meet
// - pipe.cuh: load rings, and flags handed to the warp that raises them
// - put.cuh: bytes to a peer, with a flag behind them
// - barrier.cuh: all ranks
#pragma once
#include "weft/barrier.cuh"
#include "weft/order.cuh"
#include "weft/pipe.cuh"
#include "weft/put.cuh"
#include "weft/table.cuh"
#include "weft/team.cuh"
#include "weft/wait.cuh"
