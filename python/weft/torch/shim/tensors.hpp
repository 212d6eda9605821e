// torch's tensors and reductions as the C table takes them; rejected ones raise TypeError or ValueError by name.
#pragma once

#include "weft.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace weft {

using c10d::ReduceOp;

inline std::string name_of(at::ScalarType dtype) {
  return c10::getDtypeNames(dtype).first;
}

inline void check_tensor(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(
      (tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == at::kStrided,
      name, " of a ", tensor.layout(), " tensor on ", tensor.device(), ": expected a dense tensor on cpu or cuda");
}

inline const at::Tensor& only(const char* name, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, " of ", tensors.size(), " tensors: expected one");
  check_tensor(name, tensors[0]);
  return tensors[0];
}

inline const std::vector<at::Tensor>& only(const char* name, const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, name, " of ", lists.size(), " lists of tensors: expected one");
  return lists[0];
}

inline void check_count(const char* name, const std::vector<at::Tensor>& tensors, int ranks) {
  TORCH_CHECK_VALUE(
      tensors.size() == static_cast<size_t>(ranks),
      name, " of a list of ", tensors.size(), " tensors: expected one for each of ", ranks, " ranks");
}

inline void check_alike(const char* name, const at::Tensor& tensor, const at::Tensor& other) {
  check_tensor(name, other);
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == other.scalar_type(),
      name, " of tensors of ", name_of(tensor.scalar_type()), " and ", name_of(other.scalar_type()), ": expected one dtype");
  TORCH_CHECK_TYPE(
      tensor.device() == other.device(),
      name, " of tensors on ", tensor.device(), " and ", other.device(), ": expected one device");
}

inline void check_numel(const char* name, const char* which, const at::Tensor& tensor, int64_t expected) {
  TORCH_CHECK_VALUE(
      tensor.numel() == expected,
      name, ": ", which, " of ", tensor.numel(), " elements: expected ", expected);
}

inline void check_rank(const char* name, const char* which, int64_t rank, int ranks) {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < ranks, name, ": ", which, " ", rank, ": expected a rank from 0 to ", ranks - 1);
}

inline const char* name_of(ReduceOp::RedOpType op) {
  static const char* const names[] = {
      "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "UNUSED"};
  return names[std::min<size_t>(op, 9)];
}

inline uint32_t element_of(const char* name, at::ScalarType dtype, ReduceOp::RedOpType op) {
  switch (dtype) {
    case at::kByte:
      return WEFT_U8;
    case at::kBool:
      return WEFT_BOOL;
    case at::kChar:
      return WEFT_I8;
    case at::kInt:
      return WEFT_I32;
    case at::kLong:
      return WEFT_I64;
    case at::kHalf:
      return WEFT_F16;
    case at::kBFloat16:
      return WEFT_BF16;
    case at::kFloat:
      return WEFT_F32;
    case at::kDouble:
      return WEFT_F64;
    default:
      C10_THROW_ERROR(
          TypeError,
          c10::str(
              name, " with ReduceOp.", name_of(op), " on ", name_of(dtype), ": expected float16, bfloat16, float32, float64, ",
              "int8, uint8, int32, int64 or bool; complex64 or complex128 with SUM, AVG or PREMUL_SUM"));
  }
}

// True for sums, including sums scaled by a real factor.
inline bool is_linear(const ReduceOp& op) {
  return op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM;
}

// Fills in a call's reduction.
inline void set_reduction(const char* name, const ReduceOp& op, at::ScalarType dtype, weft_call& call) {
  auto kind = op.op_;
  bool is_float = at::isFloatingType(dtype);
  auto reject = [&](const char* expected) {
    C10_THROW_ERROR(
        TypeError, c10::str(name, " with ReduceOp.", name_of(kind), " on ", name_of(dtype), ": expected ", expected));
  };
  call.element = element_of(name, dtype, kind);
  switch (kind) {
    case ReduceOp::SUM:
      call.reduction = WEFT_SUM;
      return;
    case ReduceOp::PRODUCT:
      call.reduction = WEFT_PRODUCT;
      return;
    case ReduceOp::MIN:
      call.reduction = WEFT_MIN;
      return;
    case ReduceOp::MAX:
      call.reduction = WEFT_MAX;
      return;
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      if (is_float) {
        reject("an integer dtype");
      }
      call.reduction = kind == ReduceOp::BAND ? WEFT_AND : kind == ReduceOp::BOR ? WEFT_OR : WEFT_XOR;
      return;
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      if (!is_float) {
        reject("a floating-point dtype");
      }
      call.reduction = WEFT_SUM;
      call.scale = kind == ReduceOp::AVG ? WEFT_AVERAGE : WEFT_BEFORE;
      if (kind == ReduceOp::PREMUL_SUM) {
        auto factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
        TORCH_CHECK_VALUE(factor != nullptr, name, " with ReduceOp.PREMUL_SUM: expected a factor");
        call.factor =
            factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
      }
      return;
    default:
      reject("SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM");
  }
}

} // namespace weft
