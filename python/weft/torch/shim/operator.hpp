// The operator `weft::all_reduce_`: an all-reduce without Python code from torch.distributed.
#pragma once

#include "backend.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

namespace weft {

inline c10d::ReduceOp reduction_of(c10::string_view name) {
  static constexpr std::pair<const char*, c10d::ReduceOp::RedOpType> names[] = {
      {"sum", c10d::ReduceOp::SUM},   {"avg", c10d::ReduceOp::AVG},  {"product", c10d::ReduceOp::PRODUCT},
      {"min", c10d::ReduceOp::MIN},   {"max", c10d::ReduceOp::MAX},  {"band", c10d::ReduceOp::BAND},
      {"bor", c10d::ReduceOp::BOR},   {"bxor", c10d::ReduceOp::BXOR}};
  for (auto& [each, op] : names) {
    if (name == each) {
      return op;
    }
  }
  TORCH_CHECK_VALUE(false, "weft.torch.all_reduce_: op '", name, "': expected sum, avg, product, min, max, band, bor or bxor");
}

// Returns once the result is in `tensor`. Any backend that the group has for the tensor's device serves.
inline void all_reduce_(at::Tensor& tensor, c10::string_view op, c10::string_view group) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduction_of(op);
  options.asyncOp = false;
  auto backend = c10d::resolve_process_group(std::string(group))->getBackend(tensor.device().type());
  if (auto weft = dynamic_cast<WeftBackend*>(backend.get())) {
    weft->all_reduce_now(tensor, options);
    return;
  }
  std::vector<at::Tensor> tensors{tensor};
  if (auto work = backend->allreduce(tensors, options)) {
    work->wait();
  }
}

TORCH_LIBRARY_FRAGMENT(weft, library) {
  library.def("all_reduce_(Tensor(a!) tensor, str op, str group) -> ()");
}

TORCH_LIBRARY_IMPL(weft, CPU, library) {
  library.impl("all_reduce_", TORCH_FN(all_reduce_));
}

TORCH_LIBRARY_IMPL(weft, CUDA, library) {
  library.impl("all_reduce_", TORCH_FN(all_reduce_));
}

} // namespace weft
