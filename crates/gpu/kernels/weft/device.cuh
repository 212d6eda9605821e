// Device headers of kernels that store to peers' memory.
//
// - ptx.cuh: PTX instructions without a CUDA C++ intrinsic
// - table.cuh: table of a domain, and records
// - order.cuh: named fences, and the release of many flags
// - wait.cuh: bounded waits, and records of failed ones
// - team.cuh: warps of a block with a named barrier
// - pipe.cuh: load rings, and queues of flags to the warp that raises them
// - put.cuh: copies to a peer, with a flag behind them
// - barrier.cuh: barrier of all ranks
#pragma once
#include "weft/barrier.cuh"
#include "weft/order.cuh"
#include "weft/pipe.cuh"
#include "weft/put.cuh"
#include "weft/table.cuh"
#include "weft/team.cuh"
#include "weft/wait.cuh"
