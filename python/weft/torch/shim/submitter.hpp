// Base class for the backend: submits works, and has collectives that several torch functions share.
#pragma once

#include "device.hpp"

namespace weft {

using c10::intrusive_ptr;
using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

class Submitter : public c10d::Backend {
 public:
  // `calls`: calls on the GPU, same as in `DevicePart`.
  Submitter(std::shared_ptr<Engine> engine, Milliseconds timeout, py::object calls)
      : Backend(static_cast<int>(engine->table().rank), static_cast<int>(engine->table().ranks)),
        engine_(std::move(engine)),
        timeout_(timeout),
        device_(std::make_shared<DevicePart>(std::move(calls), rank_, size_)) {
    engine_->before_close([device = device_, &engine = *engine_] { end_device(*device, engine); });
  }

 protected:
  // `submit_on_host` for CPU tensors, `submit_on_device` for GPU tensors. `start` takes either's submission.
  template <typename Options, typename Start>
  intrusive_ptr<Work> submit(
      const char* name, OpType type, Tensors outputs, const Tensors& inputs, const Options& options, Start start) {
    // An operation without tensors runs on the CPU.
    auto& some = inputs.empty() ? outputs : inputs;
    if (!some.empty() && device_->serves(some[0])) {
      auto device = some[0].device();
      return submit_on_device(name, type, std::move(outputs), inputs, device, options.asyncOp, start);
    }
    TORCH_CHECK_TYPE(
        some.empty() || some[0].is_cpu(), name, " of a tensor on ", some[0].device(), ": expected a dense tensor on cpu");
    return submit_on_host(name, type, std::move(outputs), inputs, options, start);
  }

  // Makes a work and puts the calls on a stream; the host does not wait.
  template <typename Start>
  intrusive_ptr<Work> submit_on_device(
      const char* name, OpType type, Tensors outputs, const Tensors& inputs, c10::Device device, bool is_async,
      Start start) {
    engine_->check_open(name);
    auto work = device_->submit(name, type, std::move(outputs), inputs, device, is_async, ++sequence_, start);
    if (coalesced()) {
      std::lock_guard<std::mutex> lock(coalesced_mutex_);
      // A group's collectives are in one order on all streams: the last covers the others.
      coalesced_on_device_[std::this_thread::get_id()] = work;
    }
    return work;
  }

  // A message between GPUs, on the communication stream. A coalesced message joins the thread's batch.
  intrusive_ptr<Work> transfer(const char* name, OpType type, const at::Tensor& tensor, int peer, bool receives) {
    TORCH_CHECK_VALUE(
        peer != rank_, name, " of rank ", rank_, " to itself: expected another rank; copy the tensor instead");
    engine_->check_open(name);
    DeviceMessage message{tensor, peer, receives};
    if (!coalesced()) {
      return transfer(name, type, {std::move(message)});
    }
    std::lock_guard<std::mutex> lock(coalesced_mutex_);
    auto& whole = coalesced_messages_[std::this_thread::get_id()];
    if (!whole) {
      whole = c10::make_intrusive<CoalescedMessages>(rank_);
    }
    TORCH_CHECK_VALUE(
        whole->messages.empty() || whole->messages[0].tensor.device() == tensor.device(),
        name, " of a tensor on ", tensor.device(), " in a batch of tensors on ",
        whole->messages[0].tensor.device(), ": expected one device");
    whole->messages.push_back(std::move(message));
    return whole;
  }

  // Messages between GPUs, all at the same time.
  intrusive_ptr<Work> transfer(const char* name, OpType type, const std::vector<DeviceMessage>& messages) {
    Tensors outputs, tensors;
    for (auto& each : messages) {
      tensors.push_back(each.tensor);
      if (each.receives) {
        outputs.push_back(each.tensor);
      }
    }
    auto device = tensors[0].device();
    return submit_on_device(
        name, type, std::move(outputs), tensors, device, true,
        [&](DeviceSubmission& call) { call.transfer(messages); });
  }

  // Makes a work and starts the operations. A blocking call returns once they are done. An asynchronous one joins the
  // operations that the thread coalesces.
  template <typename Options, typename Start>
  intrusive_ptr<Work> submit_on_host(
      const char* name, OpType type, Tensors outputs, const Tensors& inputs, const Options& options, Start start) {
    // With several operations, all are started before a wait.
    bool runs = !options.asyncOp && inputs.size() <= 1;
    auto work = started(name, type, std::move(outputs), inputs, options.timeout, runs, start);
    if (options.asyncOp) {
      if (auto whole = coalesced()) {
        whole->add(work);
        engine_->add(work, false);
        return work;
      }
      engine_->add(work, true);
      return work;
    }
    await(work);
    return work;
  }

  // Waits for a work that no other thread has.
  void await(const intrusive_ptr<WeftWork>& work) {
    if (work->has_ended_alone()) {
      return;
    }
    try {
      if (work->is_late) {
        work->check_signals();
      }
      work->wait();
    } catch (...) {
      // A signal may have ended only the wait.
      engine_->add(work, false);
      throw;
    }
  }

  template <typename Start>
  intrusive_ptr<WeftWork> started(
      const char* name, OpType type, Tensors outputs, const Tensors& inputs, Milliseconds timeout, bool runs,
      Start start) {
    engine_->check_open(name);
    // Only a profiler reads the title.
    auto title = at::hasCallbacks() ? c10::str("weft:", name) : std::string();
    auto work = c10::make_intrusive<WeftWork>(
        engine_, name, type, std::move(outputs), effective(timeout), ++sequence_,
        title.empty() ? nullptr : title.c_str(), inputs);
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    Submission submission(*engine_, *work, name, runs);
    try {
      start(submission);
    } catch (...) {
      work->keep_memory();
      throw;
    }
    return work;
  }

  // The work for all operations that the calling thread coalesces; null if it coalesces none.
  intrusive_ptr<WeftWork> coalesced() {
    if (coalescing_.load(std::memory_order_relaxed) == 0) {
      return nullptr;
    }
    std::lock_guard<std::mutex> lock(coalesced_mutex_);
    auto found = coalesced_.find(std::this_thread::get_id());
    return found == coalesced_.end() ? nullptr : found->second;
  }

  // The last work on a GPU among them; null if there is none.
  intrusive_ptr<Work> coalesced_on_device() {
    std::lock_guard<std::mutex> lock(coalesced_mutex_);
    auto found = coalesced_on_device_.find(std::this_thread::get_id());
    return found == coalesced_on_device_.end() ? nullptr : found->second;
  }

  // The messages between GPUs among them; null if there are none.
  intrusive_ptr<CoalescedMessages> coalesced_messages() {
    std::lock_guard<std::mutex> lock(coalesced_mutex_);
    auto found = coalesced_messages_.find(std::this_thread::get_id());
    return found == coalesced_messages_.end() ? nullptr : found->second;
  }

  // Sets or removes those works.
  void set_coalesced(intrusive_ptr<WeftWork> work) {
    std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.erase(std::this_thread::get_id());
    coalesced_on_device_.erase(std::this_thread::get_id());
    coalesced_messages_.erase(std::this_thread::get_id());
    if (work) {
      coalesced_.emplace(std::this_thread::get_id(), std::move(work));
    }
    coalescing_ = coalesced_.size();
  }

  Milliseconds effective(Milliseconds timeout) const {
    return timeout > kNoTimeout ? timeout : timeout_;
  }

  template <typename Options>
  intrusive_ptr<Work> reduce_all(const char* name, OpType type, Tensors& tensors, const Options& options) {
    check_all(name, tensors);
    return submit(name, type, tensors, tensors, options, [&](auto& call) {
      for (auto& tensor : tensors) {
        auto memory = call.in_place(tensor);
        call.reduce(WEFT_ALL_REDUCE, memory, memory, memory.numel(), options.reduceOp);
      }
    });
  }

  // Gathers input i from all ranks, in rank order, into output i.
  intrusive_ptr<Work> gather_into(
      const char* name, OpType type, Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
    check_pairs(name, outputs, inputs);
    for (size_t each = 0; each < inputs.size(); each++) {
      check_numel(name, "output", outputs[each], inputs[each].numel() * size_);
    }
    return submit(name, type, outputs, inputs, options, [&](auto& call) {
      for (size_t each = 0; each < inputs.size(); each++) {
        auto in = call.input(inputs[each]), out = call.output(outputs[each]);
        call.move(WEFT_ALL_GATHER, in, out, out.numel());
      }
    });
  }

  // Gathers input i on rank r into tensor r in list i.
  intrusive_ptr<Work> gather_all(
      const char* name, OpType type, TensorLists& lists, Tensors& inputs, const c10d::AllgatherOptions& options) {
    Tensors outputs;
    for (size_t each = 0; each < inputs.size(); each++) {
      check_tensor(name, inputs[each]);
      check_count(name, lists[each], size_);
      for (auto& output : lists[each]) {
        check_alike(name, inputs[each], output);
        check_numel(name, "output", output, inputs[each].numel());
        outputs.push_back(output);
      }
    }
    return submit(name, type, outputs, inputs, options, [&](auto& call) {
      for (size_t each = 0; each < inputs.size(); each++) {
        auto in = call.input(inputs[each]), out = call.outputs(lists[each]);
        call.move(WEFT_ALL_GATHER, in, out, out.numel());
      }
    });
  }

  // Puts this rank's share in the reduced input i into output i.
  intrusive_ptr<Work> scatter_reduced(
      const char* name, OpType type, Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    check_pairs(name, outputs, inputs);
    for (size_t each = 0; each < inputs.size(); each++) {
      check_numel(name, "input", inputs[each], outputs[each].numel() * size_);
    }
    return submit(name, type, outputs, inputs, options, [&](auto& call) {
      for (size_t each = 0; each < inputs.size(); each++) {
        auto in = call.input(inputs[each]), out = call.output(outputs[each]);
        call.reduce(WEFT_REDUCE_SCATTER, in, out, in.numel(), options.reduceOp);
      }
    });
  }

  intrusive_ptr<Work> receive(const char* name, OpType type, Tensors& tensors, uint32_t source, uint64_t tag) {
    auto& tensor = only(name, tensors);
    if (device_->serves(tensor)) {
      if (source == WEFT_ANY_RANK) {
        C10_THROW_ERROR(
            NotImplementedError,
            c10::str(
                name, " of a tensor on ", tensor.device(), ": backend weft has receives from any rank on cpu alone; pass the ",
                "source, or receive into a tensor on cpu"));
      }
      return transfer(name, type, tensor, static_cast<int>(source), true);
    }
    TORCH_CHECK_TYPE(tensor.is_cpu(), name, " of a tensor on ", tensor.device(), ": expected a dense tensor on cpu");
    return submit_on_host(name, type, tensors, tensors, c10d::AllToAllOptions{}, [&](Submission& call) {
      call.receive(source, tag, call.output(tensor));
    });
  }

  intrusive_ptr<WeftWork> send_tagged(const at::Tensor& tensor, int peer, uint64_t tag) {
    auto work = started("monitored_barrier", OpType::SEND, {}, {}, timeout_, false, [&](Submission& call) {
      call.send(peer, tag, call.input(tensor));
    });
    engine_->add(work, true);
    return work;
  }

  intrusive_ptr<WeftWork> receive_tagged(const at::Tensor& tensor, int peer, uint64_t tag) {
    auto work = started("monitored_barrier", OpType::RECV, {}, {}, timeout_, false, [&](Submission& call) {
      call.receive(static_cast<uint32_t>(peer), tag, call.input(tensor));
    });
    engine_->add(work, false);
    return work;
  }

  // True if the work is done before the deadline.
  static bool arrives(WeftWork& work, Clock::time_point until) {
    auto left = std::chrono::ceil<Milliseconds>(until - Clock::now());
    if (!work.progress(std::max(left, Milliseconds(0)))) {
      return false;
    }
    if (auto error = work.exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }

  // Bytes in each rank's part when a tensor is split along the first dimension, in rank order.
  std::vector<int64_t> split_bytes(
      const char* name, const char* which, const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    auto row = rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
    if (sizes.empty()) {
      TORCH_CHECK_VALUE(
          rows % size_ == 0, name, ": ", which, " of ", rows, " rows: expected a number divisible by ", size_, " ranks");
      return std::vector<int64_t>(size_, rows / size_ * row);
    }
    int64_t sum = 0;
    std::vector<int64_t> bytes;
    for (auto size : sizes) {
      TORCH_CHECK_VALUE(size >= 0, name, ": ", which, " split size ", size, ": expected 0 or more");
      sum += size;
      bytes.push_back(size * row);
    }
    TORCH_CHECK_VALUE(
        sizes.size() == static_cast<size_t>(size_) && sum == rows,
        name, ": ", which, " split sizes ", at::IntArrayRef(sizes), ": expected ", size_, " that add up to ", rows);
    return bytes;
  }

  static void check_all(const char* name, const Tensors& tensors) {
    TORCH_CHECK_VALUE(!tensors.empty(), name, " of no tensors: expected at least one");
    check_tensor(name, tensors[0]);
    for (auto& tensor : tensors) {
      check_alike(name, tensors[0], tensor);
    }
  }

  static void check_pairs(const char* name, const Tensors& outputs, const Tensors& inputs) {
    TORCH_CHECK_VALUE(
        outputs.size() == inputs.size() && !inputs.empty(),
        name, " of ", inputs.size(), " inputs and ", outputs.size(), " outputs: expected as many, at least one");
    for (size_t each = 0; each < inputs.size(); each++) {
      check_tensor(name, inputs[each]);
      check_alike(name, inputs[each], outputs[each]);
    }
  }

  std::shared_ptr<Engine> engine_;
  Milliseconds timeout_;
  std::shared_ptr<DevicePart> device_;
  std::atomic<uint64_t> sequence_{0};

 private:
  static void end_device(DevicePart& device, Engine& engine) {
    try {
      device.end([&] {
        engine.poison(c10::str("rank ", engine.table().rank, " ended the group during an operation on its GPU"));
      });
    } catch (const std::exception& error) {
      TORCH_WARN(error.what());
    }
  }

  std::mutex coalesced_mutex_;
  // By thread, between startCoalescing and endCoalescing.
  std::map<std::thread::id, intrusive_ptr<WeftWork>> coalesced_;
  std::map<std::thread::id, intrusive_ptr<Work>> coalesced_on_device_;
  std::map<std::thread::id, intrusive_ptr<CoalescedMessages>> coalesced_messages_;
  std::atomic<size_t> coalescing_{0};
};

} // namespace weft
