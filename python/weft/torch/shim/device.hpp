// Operations on CUDA tensors: calls to Python's `weft.torch.device.DeviceCalls`, which put kernels on the current
// stream.
//
// c10 has streams and events for any device, so no CUDA header is needed.
#pragma once

#include "submission.hpp"

#include <ATen/ScalarOps.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>

namespace weft {

namespace py = pybind11;

// Runs `call` with the GIL. Python exceptions become errors of the operation, except for Ctrl-C.
template <typename Call>
void with_python(const char* name, Call call) {
  py::gil_scoped_acquire gil;
  try {
    call();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {
      throw;
    }
    auto text = py::str(error.value()).cast<std::string>();
    std::rethrow_exception(backend_error(c10::str("weft: ", name, ": ", text)));
  }
}

// True while the current stream is being captured; `calls`: same as in DevicePart.
inline bool is_capturing(const char* name, const py::object& calls) {
  bool result = false;
  with_python(name, [&] { result = calls.attr("is_capturing")().cast<bool>(); });
  return result;
}

// Arithmetic for a call, in the names that `weft.cuda.Collectives` uses.
struct DeviceArithmetic {
  const char* element;
  const char* reduction;
  bool average;
  // Elements for each tensor element: two for a complex number.
  int64_t parts;
};

// Throws TypeError for a dtype and reduction that the kernels do not support together.
inline DeviceArithmetic device_arithmetic(const char* name, at::ScalarType dtype, const ReduceOp& op) {
  static const std::map<at::ScalarType, const char*> elements{
      {at::kBool, "bool"},     {at::kByte, "uint8"},     {at::kChar, "int8"},      {at::kUInt16, "uint16"},
      {at::kShort, "int16"},   {at::kUInt32, "uint32"},  {at::kInt, "int32"},      {at::kUInt64, "uint64"},
      {at::kLong, "int64"},    {at::kHalf, "float16"},   {at::kBFloat16, "bfloat16"},
      {at::kFloat, "float32"}, {at::kDouble, "float64"},   {at::kFloat8_e4m3fn, "float8_e4m3fn"},
      {at::kFloat8_e5m2, "float8_e5m2"}};
  static const std::map<ReduceOp::RedOpType, const char*> reductions{
      {ReduceOp::SUM, "sum"}, {ReduceOp::AVG, "sum"},  {ReduceOp::PRODUCT, "product"}, {ReduceOp::MIN, "min"},
      {ReduceOp::MAX, "max"}, {ReduceOp::BAND, "and"}, {ReduceOp::BOR, "or"},          {ReduceOp::BXOR, "xor"},
      {ReduceOp::PREMUL_SUM, "sum"}};
  ReduceOp::RedOpType kind = op.op_;
  auto reject = [&](const char* expected) {
    C10_THROW_ERROR(
        TypeError,
        c10::str(name, " with ReduceOp.", name_of(kind), " on ", name_of(dtype), " on a GPU: expected ", expected));
  };
  auto reduction = reductions.find(kind);
  if (reduction == reductions.end()) {
    reject("SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM");
  }
  bool is_complex = at::isComplexType(dtype);
  if (is_complex && !is_linear(op)) {
    reject("SUM, AVG or PREMUL_SUM; pass torch.view_as_real(tensor)");
  }
  auto real = is_complex ? c10::toRealValueType(dtype) : dtype;
  auto element = elements.find(real);
  if (element == elements.end()) {
    reject("bool, an integer dtype, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or float64; cast the tensor");
  }
  bool is_bitwise = kind == ReduceOp::BAND || kind == ReduceOp::BOR || kind == ReduceOp::BXOR;
  if (is_bitwise && at::isFloatingType(real)) {
    reject("bool or an integer dtype");
  }
  if (kind == ReduceOp::AVG && real == at::kBool) {
    reject("an integer or floating-point dtype");
  }
  if (kind == ReduceOp::PREMUL_SUM && (!at::isFloatingType(real) || at::isFloat8Type(real))) {
    reject("float16, bfloat16, float32, float64 or a complex dtype");
  }
  return {element->second, reduction->second, kind == ReduceOp::AVG, is_complex ? 2 : 1};
}

// Writes `tensor` times the PREMUL_SUM factor to `product`, which has the same shape and dtype and may be `tensor`, on
// the current stream. The factor is rounded to float32 and multiplied there, or in float64 for that dtype, and the
// result is rounded to the dtype: same as the table does on the CPU. A factor on the GPU stays there, so that captures
// have it.
inline void multiply_by_factor(const char* name, const at::Tensor& tensor, const at::Tensor& product, const ReduceOp& op) {
  auto given = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(given != nullptr, name, " with ReduceOp.PREMUL_SUM: expected a factor");
  bool is_complex = tensor.is_complex();
  auto in = (is_complex ? at::view_as_real(tensor) : tensor).view({-1});
  auto out = (is_complex ? at::view_as_real(product) : product).view({-1});
  const auto& factor = given->tensor_factor;
  if (!factor.defined() || (factor.is_cpu() && !tensor.is_cpu())) {
    auto value = factor.defined() ? factor.item<double>() : given->double_factor;
    at::mul_out(out, in, at::native::wrapped_scalar_tensor(value));
    return;
  }
  TORCH_CHECK_TYPE(
      factor.device() == tensor.device() && !factor.is_complex(),
      name, " with ReduceOp.PREMUL_SUM: factor of ", name_of(factor.scalar_type()), " on ", factor.device(),
      ": expected a real one on cpu or ", tensor.device());
  // One-dimensional, so that the factor's dtype determines the arithmetic.
  auto wide = in.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::mul_out(out, in, factor.detach().reshape({1}).to(wide));
}

// Handle for an operation on a GPU, which ends on the call's stream.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(
      int rank,
      const char* name,
      c10d::OpType type,
      std::vector<at::Tensor> outputs,
      uint64_t sequence,
      const char* title,
      const std::optional<std::vector<at::Tensor>>& inputs,
      std::shared_ptr<py::object> calls,
      std::optional<c10::Stream> stream)
      : Work(rank, type, title, inputs),
        name_(name),
        outputs_(std::move(outputs)),
        sequence_(sequence),
        calls_(std::move(calls)),
        stream_(stream) {}

  // Records the operation's end on its stream; `is_captured`: as part of a graph, where no event may be queried.
  void record_end(bool is_captured) {
    is_captured_ = is_captured;
    event_.emplace(stream_->device_type());
    event_->record(*stream_);
  }

  // Lets `wait` block the host, as a barrier does.
  void block_host() {
    blocks_host_ = true;
  }

  // Ends the profiler event: the operation is on its stream.
  void end_profile() {
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }

  bool isCompleted() override {
    if (!event_ || is_captured_) {
      return true;
    }
    // A query would invalidate this thread's capture.
    return !is_capturing(name_, *calls_) && event_->query();
  }

  // Later operations report errors in kernels.
  bool isSuccess() const override {
    return true;
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  uint64_t getSequencenumber() const override {
    return sequence_;
  }

  // Has the current stream wait for the operation.
  void synchronize() override {
    if (event_) {
      c10::impl::VirtualGuardImpl guard(stream_->device_type());
      event_->block(guard.getStream(stream_->device()));
    }
  }

  // Same as `synchronize`; with a timeout, and after a barrier, the host waits as well.
  bool wait(Milliseconds timeout = kNoTimeout) override {
    synchronize();
    if (event_ && !is_captured_ && (blocks_host_ || timeout > kNoTimeout) && !is_capturing(name_, *calls_)) {
      wait_on_host(timeout);
    }
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      std::vector<c10::Device> devices;
      c10::OptionalStreamGuard guard;
      if (stream_) {
        devices.push_back(stream_->device());
        // The future records the end on the current stream.
        guard.reset_stream(*stream_);
      }
      auto type = c10::ListType::create(c10::TensorType::get());
      future_ = c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
      future_->markCompleted(at::IValue(outputs_));
    }
    return future_;
  }

 private:
  void wait_on_host(Milliseconds timeout) {
    WithoutGil without_gil;
    auto start = Clock::now();
    auto until = timeout > kNoTimeout ? time_after(timeout) : NEVER;
    auto signals_at = start + SIGNAL_INTERVAL;
    while (!event_->query()) {
      auto now = Clock::now();
      if (now >= until) {
        std::rethrow_exception(backend_error(c10::str(
            name_, " is not done after ", timeout.count(), " ms; it goes on, and may be waited for again")));
      }
      if (now >= signals_at) {
        signals_at = now + SIGNAL_INTERVAL;
        with_python(name_, [] {
          if (PyErr_CheckSignals() != 0) {
            throw py::error_already_set();
          }
        });
      }
      if (now - start > std::chrono::microseconds(200)) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      } else {
        std::this_thread::yield();
      }
    }
    // An expired wait in the kernel left a record.
    with_python(name_, [&] { calls_->attr("check")(); });
  }

  const char* name_;
  std::vector<at::Tensor> outputs_;
  uint64_t sequence_;
  std::shared_ptr<py::object> calls_;
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> event_;
  bool is_captured_ = false;
  bool blocks_host_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Message between GPUs.
struct DeviceMessage {
  at::Tensor tensor;
  int peer;
  bool receives;
};

// Handle for coalesced messages, shared by the batch, which is put on a stream when coalescing ends.
class CoalescedMessages final : public c10d::Work {
 public:
  explicit CoalescedMessages(int rank) : Work(rank, c10d::OpType::COALESCED) {}

  std::vector<DeviceMessage> messages;

  void begin(c10::intrusive_ptr<c10d::Work> batch) {
    batch_ = std::move(batch);
  }

  bool isCompleted() override {
    return batch_ != nullptr && batch_->isCompleted();
  }

  bool isSuccess() const override {
    return batch_ != nullptr;
  }

  void synchronize() override {
    batch().synchronize();
  }

  bool wait(Milliseconds timeout = kNoTimeout) override {
    return batch().wait(timeout);
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return batch().getFuture();
  }

 private:
  c10d::Work& batch() const {
    TORCH_CHECK(batch_ != nullptr, "weft: wait for a coalesced message: expected the end of coalescing before it");
    return *batch_;
  }

  c10::intrusive_ptr<c10d::Work> batch_;
};

// Calls that make up one work on a GPU: each has contiguous memory, copied in and out on the same stream if needed.
class DeviceSubmission {
 public:
  using Segments = std::vector<int64_t>;

  DeviceSubmission(const py::object& calls, const char* name, int rank, int ranks)
      : calls_(calls), name_(name), rank_(rank), ranks_(ranks) {}

  at::Tensor input(const at::Tensor& tensor) {
    return plain_values(tensor);
  }

  at::Tensor output(const at::Tensor& tensor) {
    return is_plain(tensor) ? tensor : filled_later(tensor, at::empty(tensor.sizes(), tensor.options()));
  }

  at::Tensor in_place(const at::Tensor& tensor) {
    return is_plain(tensor) ? tensor : filled_later(tensor, plain_values(tensor));
  }

  void copy_after(const at::Tensor& to, const at::Tensor& from) {
    copies_.emplace_back(to, from);
  }

  at::Tensor outputs(const std::vector<at::Tensor>& tensors) {
    auto buffer = at::empty({static_cast<int64_t>(tensors.size()), tensors[0].numel()}, tensors[0].options());
    for (size_t each = 0; each < tensors.size(); each++) {
      copy_after(tensors[each], buffer[static_cast<int64_t>(each)].view(tensors[each].sizes()));
    }
    return buffer;
  }

  void reduce(uint32_t kind, const at::Tensor& in, const at::Tensor& out, int64_t elements, const ReduceOp& op) {
    auto arithmetic = device_arithmetic(name_, in.scalar_type(), op);
    bool is_scattered = kind == WEFT_REDUCE_SCATTER;
    check_overlap(in, out, is_scattered ? rank_ * static_cast<int64_t>(out.nbytes()) : 0, true);
    auto count = (is_scattered ? elements / ranks_ : elements) * arithmetic.parts;
    auto from = in;
    if (op.op_ == ReduceOp::PREMUL_SUM) {
      // All ranks multiply in place or none does, so that symmetric tensors match on all ranks.
      from = in.data_ptr() == out.data_ptr() && !is_scattered ? out : at::empty_like(in);
      multiply_by_factor(name_, in, from, op);
    }
    run(is_scattered ? "reduce_scatter" : "all_reduce", from, out, arithmetic.element, count, 0, &arithmetic);
  }

  // Reduces `tensor` into the root's tensor.
  void reduce_to(const at::Tensor& tensor, int64_t root, const ReduceOp& op) {
    auto arithmetic = device_arithmetic(name_, tensor.scalar_type(), op);
    auto memory = root == rank_ ? in_place(tensor) : input(tensor);
    auto from = memory;
    if (op.op_ == ReduceOp::PREMUL_SUM) {
      // Not in place at the root either: all ranks pass symmetric tensors, or none does.
      from = at::empty_like(memory);
      multiply_by_factor(name_, memory, from, op);
    }
    run("reduce", from, memory, arithmetic.element, memory.numel() * arithmetic.parts, root, &arithmetic);
  }

  void move(uint32_t kind, const at::Tensor& in, const at::Tensor& out, int64_t elements, int64_t root = 0) {
    auto part = elements / ranks_;
    switch (kind) {
      case WEFT_BROADCAST:
        return run_words("broadcast", in, out, elements, root);
      case WEFT_ALL_GATHER:
        check_overlap(out, in, rank_ * static_cast<int64_t>(in.nbytes()), true);
        return run_words("all_gather", in, out, part, 0);
      default:
        check_overlap(in, out, 0, false);
        return run_words("all_to_all", in, out, part, 0);
    }
  }

  void gather(const at::Tensor& in, const std::vector<at::Tensor>& tensors, int64_t root) {
    for (auto& each : tensors) {
      check_numel(name_, "output", each, in.numel());
    }
    auto from = input(in);
    run_words("gather", from, tensors.empty() ? from : outputs(tensors), from.numel(), root);
  }

  void scatter(const std::vector<at::Tensor>& tensors, const at::Tensor& out, int64_t root) {
    for (auto& each : tensors) {
      check_numel(name_, "input", each, out.numel());
    }
    auto into = output(out);
    run_words("scatter", tensors.empty() ? into : flat(tensors), into, out.numel(), root);
  }

  // Parts with given sizes in bytes, in rank order.
  void exchange(const at::Tensor& in, const Segments& sent, const at::Tensor& out, const Segments& received) {
    TORCH_CHECK_VALUE(
        sent[rank_] == received[rank_],
        name_, ": rank ", rank_, " sends itself ", sent[rank_], " bytes and expects ", received[rank_],
        ": expected equal sizes");
    check_overlap(in, out, 0, false);
    run_words("all_to_all", in, out, 0, 0, words_of(in, sent), words_of(in, received));
  }

  void exchange(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& tensors) {
    Segments sent, received;
    int64_t total = 0;
    for (int rank = 0; rank < ranks_; rank++) {
      sent.push_back(static_cast<int64_t>(inputs[rank].nbytes()));
      received.push_back(static_cast<int64_t>(tensors[rank].nbytes()));
      total += tensors[rank].numel();
    }
    auto buffer = at::empty({total}, tensors[0].options());
    int64_t begin = 0;
    for (auto& each : tensors) {
      copy_after(each, buffer.narrow(0, begin, each.numel()).view(each.sizes()));
      begin += each.numel();
    }
    exchange(flat(inputs), sent, buffer, received);
  }

  // Messages to and from other ranks, all at the same time.
  void transfer(const std::vector<DeviceMessage>& messages) {
    std::vector<at::Tensor> held;
    std::vector<std::tuple<int, bool, uintptr_t, uint64_t>> batch;
    for (auto& each : messages) {
      held.push_back(each.receives ? output(each.tensor) : input(each.tensor));
      batch.emplace_back(each.peer, each.receives, address(held.back()), static_cast<uint64_t>(held.back().nbytes()));
    }
    with_python(name_, [&] { calls_.attr("transfer")(batch); });
  }

  void barrier() {
    call("barrier", 0, 0, "uint8", 0, 0, nullptr, {}, {});
  }

  // Copies results to where they belong, behind the calls.
  void finish() {
    for (auto& [to, from] : copies_) {
      to.copy_(from);
    }
  }

 private:
  using Words = std::optional<std::vector<uint64_t>>;

  at::Tensor filled_later(const at::Tensor& tensor, at::Tensor made) {
    copy_after(tensor, made);
    return made;
  }

  static at::Tensor flat(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> rows;
    for (auto& each : tensors) {
      rows.push_back(plain_values(each).view({-1}));
    }
    return at::cat(rows);
  }

  // Words for an element without type, and how many.
  static std::pair<const char*, int64_t> word_of(const at::Tensor& tensor) {
    switch (tensor.element_size()) {
      case 1:
        return {"uint8", 1};
      case 2:
        return {"uint16", 1};
      case 4:
        return {"uint32", 1};
      case 8:
        return {"uint64", 1};
      default:
        return {"uint64", tensor.element_size() / 8};
    }
  }

  static Words words_of(const at::Tensor& tensor, const Segments& bytes) {
    auto each = static_cast<int64_t>(tensor.element_size()) / word_of(tensor).second;
    std::vector<uint64_t> made;
    for (auto size : bytes) {
      made.push_back(static_cast<uint64_t>(size / each));
    }
    return made;
  }

  // Throws unless `part` is apart from `whole`, or begins `at` bytes within it and may.
  void check_overlap(const at::Tensor& whole, const at::Tensor& part, int64_t at, bool may) const {
    auto begin = reinterpret_cast<uintptr_t>(whole.data_ptr()), other = reinterpret_cast<uintptr_t>(part.data_ptr());
    bool overlaps = begin < other + part.nbytes() && other < begin + whole.nbytes();
    TORCH_CHECK_VALUE(
        !overlaps || (may && other == begin + at),
        name_, ": input and output overlap: expected memory of their own",
        may ? ", or this rank's part of the longer one as the other" : "");
  }

  void run(
      const char* operation, const at::Tensor& in, const at::Tensor& out, const char* element, int64_t count,
      int64_t root, const DeviceArithmetic* arithmetic) {
    if (count > 0) {
      call(operation, address(in), address(out), element, count, root, arithmetic, {}, {});
    }
  }

  // `count` elements as words; for an uneven all-to-all, the elements in the lists.
  void run_words(
      const char* operation, const at::Tensor& in, const at::Tensor& out, int64_t count, int64_t root, Words sent = {},
      Words received = {}) {
    auto [word, each] = word_of(in);
    // All ranks pass the same number of elements, unless there are lists.
    if (count > 0 || sent) {
      call(operation, address(in), address(out), word, count * each, root, nullptr, std::move(sent), std::move(received));
    }
  }

  static uintptr_t address(const at::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data_ptr());
  }

  void call(
      const char* operation, uintptr_t in, uintptr_t out, const char* element, int64_t count, int64_t root,
      const DeviceArithmetic* arithmetic, Words sent, Words received) {
    with_python(name_, [&] {
      auto reduction = arithmetic == nullptr ? py::object(py::none()) : py::object(py::str(arithmetic->reduction));
      bool average = arithmetic != nullptr && arithmetic->average;
      calls_.attr("run")(operation, in, out, element, count, root, reduction, average, sent, received);
    });
  }

  const py::object& calls_;
  const char* name_;
  int rank_, ranks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

// A group's part for tensors on the GPU; Python makes what it needs at the first operation.
class DevicePart {
 public:
  // `calls`: a `weft.torch.device.DeviceCalls`, or None for a CPU-only group.
  DevicePart(py::object calls, int rank, int ranks) : rank_(rank), ranks_(ranks) {
    if (calls.is_none()) {
      return;
    }
    is_twin_ = calls.attr("is_twin").cast<bool>();
    // The last owner may be a thread without the GIL, or outlive the interpreter.
    calls_ = std::shared_ptr<py::object>(new py::object(std::move(calls)), [](py::object* object) {
      if (!Py_IsInitialized()) {
        object->release();
        delete object;
        return;
      }
      py::gil_scoped_acquire gil;
      delete object;
    });
  }

  bool serves(const at::Tensor& tensor) const {
    return calls_ != nullptr && (is_twin_ || tensor.is_cuda());
  }

  // True for this group's barriers, once an operation on the GPU has begun or if a GPU is named.
  bool serves_barrier(const std::vector<int64_t>& device_ids) const {
    return calls_ != nullptr && (has_started_ || (!device_ids.empty() && !is_twin_ && at::hasCUDA()));
  }

  // Device for barriers.
  c10::Device barrier_device(const std::vector<int64_t>& device_ids) const {
    if (is_twin_) {
      return {c10::kCPU};
    }
    return {c10::kCUDA, has_started_ ? index_ : static_cast<c10::DeviceIndex>(device_ids[0])};
  }

  // True if tensors on this device may be allocated in symmetric memory. torch passes no index for the CPU.
  bool allocates(c10::DeviceIndex index) const {
    return calls_ != nullptr && (is_twin_ || index >= 0);
  }

  // A tensor with `bytes` bytes in symmetric memory, on the current stream; `nullopt` if a rank has no room, and in a
  // capture. Every rank makes this call.
  std::optional<at::Tensor> allocate(const char* name, c10::Device device, int64_t bytes) {
    WithoutGil without_gil;
    std::lock_guard<std::timed_mutex> lock(mutex_);
    begin(name, device);
    std::optional<at::Tensor> result;
    with_python(name, [&] {
      py::object made = calls_->attr("allocate")(bytes);
      if (!made.is_none()) {
        result = made.cast<at::Tensor>();
      }
    });
    return result;
  }

  // Makes a work and puts the calls on a stream: on the current one, or behind it on the communication stream.
  template <typename Start>
  c10::intrusive_ptr<DeviceWork> submit(
      const char* name, c10d::OpType type, std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
      c10::Device device, bool is_async, uint64_t sequence, Start start) {
    WithoutGil without_gil;
    // A group's calls are whole, and in order, among threads.
    std::lock_guard<std::timed_mutex> lock(mutex_);
    begin(name, device);
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    DeviceSubmission submission(*calls_, name, rank_, ranks_);
    auto title = at::hasCallbacks() ? c10::str("weft:", name) : std::string();
    auto made = [&](std::optional<c10::Stream> stream) {
      auto profiled = title.empty() ? std::nullopt : std::make_optional(inputs);
      auto shown = title.empty() ? nullptr : title.c_str();
      return c10::make_intrusive<DeviceWork>(rank_, name, type, outputs, sequence, shown, profiled, calls_, stream);
    };
    auto launch = [&](DeviceWork& work) {
      start(submission);
      submission.finish();
      work.end_profile();
    };
    if (is_twin_) {
      auto work = made(std::nullopt);
      launch(*work);
      return work;
    }
    c10::impl::VirtualGuardImpl streams(device.type());
    c10::DeviceGuard on_device(device);
    auto current = streams.getStream(device);
    if (!is_async) {
      auto work = made(current);
      launch(*work);
      if (type == c10d::OpType::BARRIER) {
        work->record_end(is_capturing(name, *calls_));
      }
      return work;
    }
    c10::Event before(device.type());
    before.record(current);
    before.block(*own_);
    c10::StreamGuard on_stream(*own_);
    // The allocator reuses this memory only behind the communication stream.
    auto record = [&](const at::Tensor& tensor) {
      streams.recordDataPtrOnStream(tensor.storage().data_ptr(), *own_);
    };
    std::for_each(inputs.begin(), inputs.end(), record);
    std::for_each(outputs.begin(), outputs.end(), record);
    auto work = made(*own_);
    launch(*work);
    work->record_end(is_capturing(name, *calls_));
    return work;
  }

  // Frees the GPU memory, only on this rank, behind calls in flight. `end_waits` ends waits in calls that take long.
  template <typename EndWaits>
  void end(EndWaits end_waits) {
    if (calls_ == nullptr || !has_started_ || !Py_IsInitialized()) {
      return;
    }
    WithoutGil without_gil;
    const char* name = "destroy_process_group";
    double grace = 0;
    with_python(name, [&] { grace = calls_->attr("end_grace").template cast<double>(); });
    std::unique_lock<std::timed_mutex> lock(mutex_, std::chrono::duration<double>(grace));
    bool has_settled = lock.owns_lock();
    if (has_settled) {
      with_python(name, [&] { has_settled = calls_->attr("settle")().template cast<bool>(); });
    }
    if (!has_settled) {
      end_waits();
    }
    with_python(name, [&] { calls_->attr("end")(); });
  }

 private:
  // Makes the GPU's collectives at the first operation: a collective call.
  void begin(const char* name, c10::Device device) {
    if (has_started_) {
      TORCH_CHECK_VALUE(
          is_twin_ || device.index() == index_,
          name, " of a tensor on ", device, ": expected cuda:", static_cast<int>(index_),
          ", the device of the group's first operation; use one device for each rank and group");
      return;
    }
    with_python(name, [&] {
      auto stream = calls_->attr("start")(static_cast<int>(device.has_index() ? device.index() : 0));
      if (!is_twin_) {
        auto [id, index, type] = stream.cast<std::tuple<int64_t, int64_t, int64_t>>();
        own_ = c10::Stream::unpack3(
            id, static_cast<c10::DeviceIndex>(index), static_cast<c10::DeviceType>(type));
      }
    });
    index_ = device.index();
    has_started_ = true;
  }

  std::shared_ptr<py::object> calls_;
  int rank_, ranks_;
  bool is_twin_ = false;
  std::timed_mutex mutex_;
  std::atomic<bool> has_started_{false};
  c10::DeviceIndex index_ = 0;
  // High-priority stream for asynchronous operations, which all groups on the GPU share.
  std::optional<c10::Stream> own_;
};

} // namespace weft
