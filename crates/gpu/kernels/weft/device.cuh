// Device headers for kernels that store to peers' memory.
//
// - ptx.cuh: PTX instructions without a CUDA C++ intrinsic
// - table.cuh: domain table, and records
// - command.cuh: proxy commands
// - order.cuh: named fences, and one release for many flags
// - wait.cuh: bounded waits, and records for failed ones
// - team.cuh: warps in a block with a named barrier
// - pipe.cuh: load rings, and flag queues to the warp that raises them
// - put.cuh: copies to a peer, with a flag behind them
// - proxy.cuh: commands to the host's proxy, and waits for its words
// - barrier.cuh: barrier across all ranks
#pragma once
#include "weft/barrier.cuh"
#include "weft/command.cuh"
#include "weft/order.cuh"
#include "weft/pipe.cuh"
#include "weft/proxy.cuh"
#include "weft/put.cuh"
#include "weft/table.cuh"
#include "weft/team.cuh"
#include "weft/wait.cuh"
