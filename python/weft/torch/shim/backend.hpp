// The backend `weft` for torch.distributed: collectives in terms of the C table.
#pragma once

#include "submitter.hpp"

namespace weft {

// Message tag for monitored_barrier, beyond program tags.
constexpr uint64_t MONITORED_BARRIER = uint64_t{1} << 32;

class WeftBackend final : public Submitter {
 public:
  // Makes the backend for some ranks in this one; without the GIL held.
  using Splitter = intrusive_ptr<c10d::Backend> (*)(
      const intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout, const std::string& settings);

  // `settings`: the group's settings, for groups that are split from it.
  WeftBackend(
      std::shared_ptr<Engine> engine, Milliseconds timeout, std::string settings, Splitter splitter, py::object calls)
      : Submitter(std::move(engine), timeout, std::move(calls)), settings_(std::move(settings)), splitter_(splitter) {
    init();
  }

  ~WeftBackend() override {
    engine_->close_quietly("the process group was destroyed");
  }

  const std::string getBackendName() const override {
    return "weft";
  }

  intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("weft", timeout_);
  }

  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
  }

  void setSequenceNumberForGroup() override {}

  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }

  c10d::ErrorType getError() override {
    return engine_->has_failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  }

  // Ends the group at every rank; calls and waits raise from now on. Groups that are being formed end too.
  void abort() override {
    aborts += 1;
    engine_->abort();
  }

  void shutdown() override {
    engine_->close("the process group was destroyed");
  }

  bool supportsSplitting() const override {
    return true;
  }

  intrusive_ptr<Backend> split(
      const intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const intrusive_ptr<Options>& options) override {
    auto self = std::find(ranks.begin(), ranks.end(), rank_);
    if (self == ranks.end()) {
      return nullptr;
    }
    // torch splits each device type, and this backend serves two.
    if (split_store_ == store) {
      if (auto made = split_.lock()) {
        return made;
      }
    }
    auto timeout = options ? options->timeout : timeout_;
    auto rank = static_cast<int>(self - ranks.begin());
    auto made = splitter_(store, rank, static_cast<int>(ranks.size()), timeout, settings_);
    split_ = c10::weak_intrusive_ptr<Backend>(made);
    split_store_ = store;
    return made;
  }

  bool supportsTensorAlloc(c10::DeviceIndex index) override {
    return device_->allocates(index);
  }

  // A one-dimensional tensor in symmetric memory, whose operations are direct; in torch's own if there is no room.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    const char* name = "allocate_tensor";
    engine_->check_open(name);
    TORCH_CHECK_VALUE(size >= 0, name, " of ", size, " elements: expected 0 or more");
    auto bytes = static_cast<int64_t>(size * options.dtype().itemsize());
    auto memory = device_->allocate(name, options.device(), bytes);
    return memory ? memory->view(c10::typeMetaToScalarType(options.dtype())) : at::empty({size}, options);
  }

  bool supportsCoalescing() const override {
    return true;
  }

  // A program exception may have skipped an earlier end: those operations remain separate works.
  void startCoalescing() override {
    engine_->check_open("coalesced operations");
    set_coalesced(c10::make_intrusive<WeftWork>(
        engine_, "coalesced operations", OpType::COALESCED, Tensors{}, timeout_, ++sequence_, nullptr, std::nullopt));
  }

  intrusive_ptr<Work> endCoalescing() override {
    auto work = coalesced();
    TORCH_CHECK(work, "weft: endCoalescing: expected startCoalescing before it, in the same thread");
    auto last = coalesced_on_device();
    auto messages = coalesced_messages();
    set_coalesced(nullptr);
    if (messages) {
      last = transfer("coalesced messages", OpType::COALESCED, messages->messages);
      messages->begin(last);
      messages->messages.clear();
    }
    if (last) {
      // CPU operations, if there are any, end first.
      await(work);
      return last;
    }
    engine_->add(work, true);
    return work;
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const char* name = "broadcast";
    auto& tensor = only(name, tensors);
    check_rank(name, "root", options.rootRank, size_);
    return submit(name, OpType::BROADCAST, tensors, tensors, options, [&](auto& call) {
      auto memory = call.in_place(tensor);
      call.move(WEFT_BROADCAST, memory, memory, memory.numel(), options.rootRank);
    });
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    only("all_reduce", tensors);
    return reduce_all("all_reduce", OpType::ALLREDUCE, tensors, options);
  }

  // Blocking all-reduce; makes a work only if it takes long.
  void all_reduce_now(at::Tensor& tensor, const c10d::AllreduceOptions& options) {
    const char* name = "all_reduce";
    check_tensor(name, tensor);
    if (device_->serves(tensor) || !is_plain(tensor) || tensor.numel() == 0 || at::hasCallbacks()) {
      Tensors tensors{tensor};
      allreduce(tensors, options);
      return;
    }
    auto call = reduction_call(name, WEFT_ALL_REDUCE, tensor, tensor, tensor.numel(), options.reduceOp);
    engine_->check_open(name);
    auto sequence = ++sequence_;
    WithoutGil without_gil;
    uint64_t id = 0;
    auto status = engine_->table().run(engine_->context(), &call, FIRST_WAIT_NS, &id);
    if (id != 0) {
      auto work = c10::make_intrusive<WeftWork>(
          engine_, name, OpType::ALLREDUCE, Tensors{tensor}, effective(options.timeout), sequence, nullptr,
          std::nullopt);
      work->add(id);
      work->is_late = true;
      await(work);
    } else if (status != WEFT_OK) {
      engine_->keep({tensor});
      check_status(*engine_, name, status);
    }
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all("all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, tensors, options);
  }

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const char* name = "reduce";
    auto& tensor = only(name, tensors);
    check_rank(name, "destination", options.rootRank, size_);
    return submit(name, OpType::REDUCE, tensors, tensors, options, [&](auto& call) {
      call.reduce_to(tensor, options.rootRank, options.reduceOp);
    });
  }

  intrusive_ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    Tensors outputs{out}, inputs{in};
    return gather_into("all_gather_into_tensor", OpType::_ALLGATHER_BASE, outputs, inputs, options);
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_into("all_gather_into_tensor_coalesced", OpType::COALESCED, outputs, inputs, options);
  }

  intrusive_ptr<Work> allgather(TensorLists& lists, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const char* name = "all_gather";
    only(name, lists);
    only(name, inputs);
    return gather_all(name, OpType::ALLGATHER, lists, inputs, options);
  }

  intrusive_ptr<Work> allgather_coalesced(
      TensorLists& lists, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const char* name = "all_gather_coalesced";
    TORCH_CHECK_VALUE(
        lists.size() == static_cast<size_t>(size_),
        name, " of ", lists.size(), " lists of tensors: expected one for each of ", size_, " ranks");
    // List r has rank r's tensors; gather_all takes the tensors for each input.
    TensorLists by_input(inputs.size());
    for (size_t input = 0; input < inputs.size(); input++) {
      for (auto& list : lists) {
        TORCH_CHECK_VALUE(
            list.size() == inputs.size(),
            name, " of a list of ", list.size(), " tensors: expected one for each of ", inputs.size(), " inputs");
        by_input[input].push_back(list[input]);
      }
    }
    return gather_all(name, OpType::ALLGATHER_COALESCED, by_input, inputs, options);
  }

  intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{out}, inputs{in};
    return scatter_reduced("reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, outputs, inputs, options);
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return scatter_reduced("reduce_scatter_tensor_coalesced", OpType::COALESCED, outputs, inputs, options);
  }

  intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, TensorLists& lists, const c10d::ReduceScatterOptions& options) override {
    const char* name = "reduce_scatter";
    auto& out = only(name, outputs);
    auto& inputs = only(name, lists);
    check_count(name, inputs, size_);
    int64_t longest = 0;
    for (auto& each : inputs) {
      check_alike(name, out, each);
      longest = std::max(longest, each.numel());
    }
    check_numel(name, "output", out, inputs[rank_].numel());
    return submit(name, OpType::REDUCE_SCATTER, outputs, inputs, options, [&](auto& call) {
      // The table takes equal shares: shorter ones are padded.
      auto in = at::zeros({size_, longest}, out.options());
      for (int64_t rank = 0; rank < size_; rank++) {
        in[rank].narrow(0, 0, inputs[rank].numel()).copy_(inputs[rank].reshape({-1}));
      }
      in = call.input(in);
      auto share = is_plain(out) && out.numel() == longest ? out : at::empty({longest}, out.options());
      if (!share.is_same(out)) {
        call.copy_after(out, share.narrow(0, 0, out.numel()).view(out.sizes()));
      }
      call.reduce(WEFT_REDUCE_SCATTER, in, share, in.numel(), options.reduceOp);
    });
  }

  intrusive_ptr<Work> alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& received, std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& options) override {
    const char* name = "all_to_all_single";
    check_alike(name, in, out);
    check_tensor(name, in);
    Tensors outputs{out}, inputs{in};
    // Equal shares here may differ at another rank, which passes sizes then, as this one does.
    bool is_equal = received.empty() && sent.empty();
    auto sources = is_equal ? std::vector<int64_t>{} : split_bytes(name, "input", in, sent);
    auto destinations = is_equal ? std::vector<int64_t>{} : split_bytes(name, "output", out, received);
    if (is_equal) {
      check_numel(name, "output", out, in.numel());
      TORCH_CHECK_VALUE(
          in.dim() == 0 ? in.numel() % size_ == 0 : in.size(0) % size_ == 0,
          name, ": input of ", in.sizes(), ": expected a first dimension divisible by ", size_, " ranks");
    }
    return submit(name, OpType::ALLTOALL_BASE, outputs, inputs, options, [&](auto& call) {
      auto from = call.input(in), to = call.output(out);
      if (is_equal) {
        call.move(WEFT_ALL_TO_ALL, from, to, from.numel());
      } else {
        call.exchange(from, sources, to, destinations);
      }
    });
  }

  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const char* name = "all_to_all";
    check_count(name, outputs, size_);
    check_count(name, inputs, size_);
    check_all(name, outputs);
    check_all(name, inputs);
    return submit(name, OpType::ALLTOALL, outputs, inputs, options, [&](auto& call) {
      call.exchange(inputs, outputs);
    });
  }

  intrusive_ptr<Work> gather(TensorLists& lists, Tensors& inputs, const c10d::GatherOptions& options) override {
    const char* name = "gather";
    auto& in = only(name, inputs);
    check_rank(name, "destination", options.rootRank, size_);
    Tensors outputs;
    if (options.rootRank == rank_) {
      outputs = only(name, lists);
      check_count(name, outputs, size_);
      check_all(name, outputs);
    }
    return submit(name, OpType::GATHER, outputs, inputs, options, [&](auto& call) {
      call.gather(in, outputs, options.rootRank);
    });
  }

  intrusive_ptr<Work> scatter(Tensors& outputs, TensorLists& lists, const c10d::ScatterOptions& options) override {
    const char* name = "scatter";
    auto& out = only(name, outputs);
    check_rank(name, "source", options.rootRank, size_);
    Tensors inputs;
    if (options.rootRank == rank_) {
      inputs = only(name, lists);
      check_count(name, inputs, size_);
      check_all(name, inputs);
    }
    return submit(name, OpType::SCATTER, outputs, inputs, options, [&](auto& call) {
      call.scatter(inputs, out, options.rootRank);
    });
  }

  intrusive_ptr<Work> send(Tensors& tensors, int destination, int tag) override {
    auto& tensor = only("send", tensors);
    check_rank("send", "destination", destination, size_);
    if (device_->serves(tensor)) {
      return transfer("send", OpType::SEND, tensor, destination, false);
    }
    TORCH_CHECK_TYPE(tensor.is_cpu(), "send of a tensor on ", tensor.device(), ": expected a dense tensor on cpu");
    return submit_on_host("send", OpType::SEND, {}, tensors, c10d::AllToAllOptions{}, [&](Submission& call) {
      call.send(destination, tag, call.input(tensor));
    });
  }

  intrusive_ptr<Work> recv(Tensors& tensors, int source, int tag) override {
    check_rank("recv", "source", source, size_);
    return receive("recv", OpType::RECV, tensors, static_cast<uint32_t>(source), tag);
  }

  intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    return receive("recvAnySource", OpType::RECVANYSOURCE, tensors, WEFT_ANY_RANK, tag);
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    if (device_->serves_barrier(options.device_ids)) {
      auto work = submit_on_device(
          "barrier", OpType::BARRIER, {}, {}, device_->barrier_device(options.device_ids), options.asyncOp,
          [](DeviceSubmission& call) { call.barrier(); });
      static_cast<DeviceWork*>(work.get())->block_host();
      if (!options.asyncOp) {
        work->wait();
      }
      return work;
    }
    return submit_on_host("barrier", OpType::BARRIER, {}, {}, options, [&](Submission& call) {
      auto token = call.input(at::zeros({1}, at::kByte));
      call.reduce(WEFT_ALL_REDUCE, token, token, 1, ReduceOp(ReduceOp::MAX));
    });
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    WithoutGil without_gil;
    // Zero is a time limit here, as it is in gloo.
    auto timeout = options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
    auto until = Clock::now() + timeout;
    auto token = at::zeros({1}, at::kByte);
    if (rank_ != 0) {
      send_tagged(token, 0, MONITORED_BARRIER);
      // Rank 0 may enter later, and then waits for the whole timeout.
      if (!arrives(*receive_tagged(token, 0, MONITORED_BARRIER), until + timeout)) {
        fail_group(c10::str("rank 0 did not respond within ", 2 * timeout.count(), " ms"));
      }
      return;
    }
    std::vector<intrusive_ptr<WeftWork>> arrivals;
    for (int rank = 1; rank < size_; rank++) {
      arrivals.push_back(receive_tagged(at::zeros({1}, at::kByte), rank, MONITORED_BARRIER));
    }
    std::vector<int> missing;
    for (int rank = 1; rank < size_ && (missing.empty() || wait_all_ranks); rank++) {
      if (!arrives(*arrivals[rank - 1], until)) {
        missing.push_back(rank);
      }
    }
    if (!missing.empty()) {
      fail_group(c10::str(
          "rank", missing.size() > 1 ? "s " : " ", c10::Join(", ", missing), " did not arrive within ",
          timeout.count(), " ms"));
    }
    for (int rank = 1; rank < size_; rank++) {
      send_tagged(token, rank, MONITORED_BARRIER);
    }
  }

 private:
  // Ends the group at every rank and throws.
  [[noreturn]] void fail_group(const std::string& reason) {
    auto text = "monitored_barrier: " + reason;
    engine_->record_failure(text);
    engine_->poison(text);
    std::rethrow_exception(backend_error("weft: " + text));
  }

  std::string settings_;
  Splitter splitter_;
  // The last group that was split from this one, and the store.
  c10::weak_intrusive_ptr<Backend> split_{intrusive_ptr<Backend>()};
  intrusive_ptr<c10d::Store> split_store_;
};

} // namespace weft
