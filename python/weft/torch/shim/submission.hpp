// Operations that make up one work: each is started with contiguous memory, copied in and out if needed.
#pragma once

#include "progress.hpp"
#include "tensors.hpp"

namespace weft {

// True if the memory in `tensor` holds the values in order: contiguous, and neither lazily conjugated nor negated.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Contiguous memory with the values in `tensor`.
inline at::Tensor plain_values(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : tensor.contiguous().resolve_conj().resolve_neg();
}

// Wait time for a blocking collective when it is started, before signals are looked for.
constexpr uint64_t FIRST_WAIT_NS = std::chrono::nanoseconds(SIGNAL_INTERVAL).count();

// Throws an error from a table function, if it is one.
inline void check_status(Engine& engine, const char* name, int32_t status) {
  if (status == WEFT_OK) {
    return;
  }
  auto text = last_error(engine.table());
  if (status == WEFT_LOST || status == WEFT_CLOSED) {
    text = engine.record_failure(text);
  }
  std::rethrow_exception(backend_error(c10::str("weft: ", name, ": ", text)));
}

// Reduction call for contiguous tensors; `elements` counts the whole vector.
inline weft_call reduction_call(
    const char* name, uint32_t kind, const at::Tensor& in, const at::Tensor& out, int64_t elements, const ReduceOp& op) {
  weft_call call{};
  call.kind = kind;
  call.input = in.data_ptr();
  call.output = out.data_ptr();
  auto dtype = in.scalar_type();
  if (at::isComplexType(dtype) && is_linear(op)) {
    // Real and imaginary parts are added alike.
    dtype = c10::toRealValueType(dtype);
    elements *= 2;
  }
  set_reduction(name, op, dtype, call);
  call.elements = static_cast<uint64_t>(elements);
  return call;
}

class Submission {
 public:
  // `runs`: a collective is waited for when it is started, at first for SIGNAL_INTERVAL.
  Submission(Engine& engine, WeftWork& work, const char* name, bool runs)
      : engine_(engine), work_(work), name_(name), runs_(runs) {}

  // Contiguous memory with the values in `tensor`.
  at::Tensor input(const at::Tensor& tensor) {
    auto plain = plain_values(tensor);
    work_.hold(plain);
    return plain;
  }

  // Contiguous memory in the shape of `tensor`, whose contents end up in it.
  at::Tensor output(const at::Tensor& tensor) {
    if (is_plain(tensor)) {
      return tensor;
    }
    auto made = at::empty(tensor.sizes(), tensor.options());
    work_.copy_after(tensor, made);
    return made;
  }

  // Same as `output`, but starts with the values in `tensor`.
  at::Tensor in_place(const at::Tensor& tensor) {
    if (is_plain(tensor)) {
      return tensor;
    }
    auto made = plain_values(tensor);
    work_.copy_after(tensor, made);
    return made;
  }

  // Copies `from` to `to` once the operation is done.
  void copy_after(const at::Tensor& to, const at::Tensor& from) {
    work_.copy_after(to, from);
  }

  // One buffer for equally sized tensors, whose contents end up in them.
  at::Tensor outputs(const std::vector<at::Tensor>& tensors) {
    auto size = tensors[0].numel();
    auto buffer = at::empty({static_cast<int64_t>(tensors.size()), size}, tensors[0].options());
    for (size_t each = 0; each < tensors.size(); each++) {
      work_.copy_after(tensors[each], buffer[static_cast<int64_t>(each)].view(tensors[each].sizes()));
    }
    work_.hold(buffer);
    return buffer;
  }

  // Reduces contiguous tensors; `elements` counts the whole vector.
  void reduce(uint32_t kind, const at::Tensor& in, const at::Tensor& out, int64_t elements, const ReduceOp& op) {
    start(reduction_call(name_, kind, in, out, elements, op));
  }

  // Moves contiguous bytes; `elements` counts the whole vector.
  void move(uint32_t kind, const at::Tensor& in, const at::Tensor& out, int64_t elements, int64_t root = 0) {
    weft_call call{};
    call.kind = kind;
    call.element = WEFT_U8;
    call.root = static_cast<uint32_t>(root);
    call.input = in.data_ptr();
    call.output = out.data_ptr();
    call.elements = static_cast<uint64_t>(elements) * in.element_size();
    start(call);
  }

  // Reduces `tensor` into the root's tensor.
  void reduce_to(const at::Tensor& tensor, int64_t root, const ReduceOp& op) {
    auto in = input(tensor);
    auto out = root == static_cast<int64_t>(engine_.table().rank) ? in_place(tensor) : input(at::empty_like(in));
    reduce(WEFT_ALL_REDUCE, in, out, in.numel(), op);
  }

  // Sends `in` to this rank's place among the root's tensors.
  void gather(const at::Tensor& in, const std::vector<at::Tensor>& tensors, int64_t root) {
    std::vector<weft_segment> sends(engine_.table().ranks), receives(engine_.table().ranks);
    sends[root] = segment(input(in));
    for (size_t rank = 0; rank < tensors.size(); rank++) {
      receives[rank] = segment(output(tensors[rank]));
    }
    exchange(sends, receives);
  }

  // Receives this rank's tensor from the root into `out`.
  void scatter(const std::vector<at::Tensor>& tensors, const at::Tensor& out, int64_t root) {
    std::vector<weft_segment> sends(engine_.table().ranks), receives(engine_.table().ranks);
    receives[root] = segment(output(out));
    for (size_t rank = 0; rank < tensors.size(); rank++) {
      sends[rank] = segment(input(tensors[rank]));
    }
    exchange(sends, receives);
  }

  // Parts with given sizes in bytes, in rank order.
  void exchange(
      const at::Tensor& in, const std::vector<int64_t>& sent, const at::Tensor& out,
      const std::vector<int64_t>& received) {
    exchange(segments(in, sent), segments(out, received));
  }

  // Input r goes to rank r, output r comes from there.
  void exchange(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& tensors) {
    std::vector<weft_segment> sends, receives;
    for (size_t rank = 0; rank < inputs.size(); rank++) {
      sends.push_back(segment(input(inputs[rank])));
      receives.push_back(segment(output(tensors[rank])));
    }
    exchange(sends, receives);
  }

  void send(int peer, uint64_t tag, const at::Tensor& tensor) {
    uint64_t id = 0;
    check(engine_.table().send(
        engine_.context(), static_cast<uint32_t>(peer), tag, tensor.data_ptr(),
        tensor.nbytes(), &id));
    work_.add(id);
  }

  void receive(uint32_t peer, uint64_t tag, const at::Tensor& tensor) {
    uint64_t id = 0;
    check(engine_.table().receive(
        engine_.context(), peer, tag, tensor.data_ptr(), tensor.nbytes(), &id));
    work_.add(id);
  }

 private:
  static weft_segment segment(const at::Tensor& tensor) {
    return {tensor.data_ptr(), tensor.nbytes()};
  }

  static std::vector<weft_segment> segments(const at::Tensor& tensor, const std::vector<int64_t>& bytes) {
    std::vector<weft_segment> made;
    auto data = static_cast<char*>(tensor.data_ptr());
    for (auto each : bytes) {
      made.push_back({data, static_cast<uint64_t>(each)});
      data += each;
    }
    return made;
  }

  void exchange(const std::vector<weft_segment>& sends, const std::vector<weft_segment>& receives) {
    uint64_t id = 0;
    check(engine_.table().exchange(engine_.context(), sends.data(), receives.data(), &id));
    work_.add(id);
  }

  void start(const weft_call& call) {
    // All ranks pass the same number of elements, so no rank starts anything.
    if (call.elements == 0) {
      return;
    }
    uint64_t id = 0;
    if (!runs_) {
      check(engine_.table().start(engine_.context(), &call, &id));
      work_.add(id);
      return;
    }
    WithoutGil without_gil;
    auto status = engine_.table().run(engine_.context(), &call, FIRST_WAIT_NS, &id);
    if (id != 0) {
      work_.add(id);
      work_.is_late = true;
    } else {
      check(status);
    }
  }

  void check(int32_t status) {
    check_status(engine_, name_, status);
  }

  Engine& engine_;
  WeftWork& work_;
  const char* name_;
  bool runs_;
};

} // namespace weft
