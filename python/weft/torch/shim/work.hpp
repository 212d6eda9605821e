// Handle for an operation: waits, future, and the tensors that stay alive until the operation is done.
#pragma once

#include "engine.hpp"

#include <pybind11/pybind11.h>

namespace weft {

// Time between two checks for Python signals in a wait.
constexpr Milliseconds SIGNAL_INTERVAL{100};

// Runs signal handlers on a Python thread; throws an exception from one.
inline void run_signal_handlers() {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) {
    return;
  }
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

// Deadline for a work without one.
constexpr Clock::time_point NEVER = Clock::time_point::max();

class WeftWork : public c10d::Work {
 public:
  WeftWork(
      std::shared_ptr<Engine> engine,
      const char* name,
      c10d::OpType type,
      std::vector<at::Tensor> outputs,
      Milliseconds timeout,
      uint64_t sequence,
      const char* title,
      const std::optional<std::vector<at::Tensor>>& inputs)
      : Work(static_cast<int>(engine->table().rank), type, title, inputs),
        engine_(std::move(engine)),
        name_(name),
        outputs_(std::move(outputs)),
        timeout_(timeout),
        // A message may be posted long before its peer's: its time limit runs while the program waits.
        deadline_(c10d::isP2POp(type) ? NEVER : time_after(timeout)),
        sequence_(sequence),
        depth_(CallbackRun::next_depth()),
        starter_(CallbackRun::current()) {
    if (starter_) {
      starter_->in_flight += 1;
    }
  }

  ~WeftWork() override {
    leave_starter();
  }

  // A table operation that is part of this work.
  void add(uint64_t id) {
    ids_.push_back(id);
  }

  // A work that is part of this one, before this one is awaited.
  void add(c10::intrusive_ptr<WeftWork> part) {
    if (parts_.size() == prune_at_) {
      // A program exception may have skipped the end of coalescing: parts would pile up.
      auto is_over = [](auto& each) { return each->isSuccess(); };
      parts_.erase(std::remove_if(parts_.begin(), parts_.end(), is_over), parts_.end());
      prune_at_ = std::max(prune_at_, 2 * parts_.size());
    }
    parts_.push_back(std::move(part));
  }

  // Keeps a tensor alive until the operations are done.
  void hold(const at::Tensor& tensor) {
    held_.push_back(tensor);
  }

  // Copies `from` to `to` once the operation is done.
  void copy_after(const at::Tensor& to, const at::Tensor& from) {
    held_.push_back(from);
    copies_.emplace_back(to, from);
  }

  bool isCompleted() override {
    if (state_.load(std::memory_order_acquire) == DONE) {
      return true;
    }
    engine_->check_not_forked(name_);
    if (!is_done()) {
      // The leader makes progress; it also ends works in a closed group, which are never done.
      leave_to_leader();
      return false;
    }
    progress(Milliseconds(0));
    return is_complete();
  }

  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_ && !exception_;
  }

  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return exception_;
  }

  int sourceRank() const override {
    TORCH_CHECK(source_ >= 0, "sourceRank: expected a completed receive from any rank");
    return source_;
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  uint64_t getSequencenumber() const override {
    return sequence_;
  }

  void synchronize() override {}

  void abort() override {
    engine_->close(std::string(name_) + ": aborted by this rank");
  }

  bool wait(Milliseconds timeout = kNoTimeout) override {
    // torch also waits for a blocking call's work, which is complete.
    if (!is_complete()) {
      wait_until_complete(timeout);
    }
    if (auto error = exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    engine_->check_not_forked(name_);
    bool complete;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (future_) {
        return future_;
      }
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      complete = completed_;
    }
    if (complete) {
      settle_future();
    } else {
      leave_to_leader();
    }
    return future_;
  }

  // Waits at most `slice` for the operation and completes the work if it is done, has failed or is past the deadline.
  // Returns true if the work is complete.
  bool progress(Milliseconds slice) {
    for (auto& part : parts_) {
      if (!part->progress(slice)) {
        return fail_after_deadline(last_error(engine_->table()));
      }
      if (auto error = part->exception()) {
        if (begin_end()) {
          end(error);
        }
        return true;
      }
    }
    for (auto id : ids_) {
      uint32_t from = WEFT_ANY_RANK;
      auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(slice).count();
      auto status = engine_->table().wait(engine_->context(), id, nanoseconds, &from);
      if (status == WEFT_OK) {
        if (from != WEFT_ANY_RANK) {
          source_ = static_cast<int>(from);
        }
        continue;
      }
      auto text = last_error(engine_->table());
      if (status != WEFT_TIMEOUT) {
        fail(text, status == WEFT_LOST || status == WEFT_CLOSED);
        return true;
      }
      return fail_after_deadline(text);
    }
    if (retrieveOpType() == c10d::OpType::RECVANYSOURCE) {
      // Another thread may have taken the message, and sets the sender next.
      while (source_.load(std::memory_order_acquire) < 0) {
        std::this_thread::yield();
      }
    }
    complete();
    return true;
  }

  // True if all operations in this work are done.
  bool is_done() const {
    auto is_part_done = [](auto& part) { return part->is_complete() || part->is_done(); };
    return std::all_of(parts_.begin(), parts_.end(), is_part_done) &&
        std::all_of(ids_.begin(), ids_.end(), [this](uint64_t id) {
             return engine_->table().is_done(engine_->context(), id) == 1;
           });
  }

  // True if the work has ended, with success or an error.
  bool is_complete() const {
    return state_.load(std::memory_order_acquire) == DONE;
  }

  // Ends the work with an error, unless it has ended; `with_group`: the error ended the group, whose first error it
  // then reports.
  void fail(const std::string& text, bool with_group) {
    if (!begin_end()) {
      return;
    }
    auto reason = with_group ? engine_->record_failure(text) : text;
    keep_memory();
    end(backend_error(c10::str("weft: ", name_, ": ", reason)));
  }

  // Leaves memory that peers may still access to the engine.
  void keep_memory() {
    auto tensors = outputs_;
    tensors.insert(tensors.end(), held_.begin(), held_.end());
    engine_->keep(std::move(tensors));
  }

  // Completes the work after the operations.
  void complete() {
    if (!begin_end()) {
      return;
    }
    std::exception_ptr error;
    try {
      copy_results();
    } catch (...) {
      error = std::current_exception();
    }
    end(error);
  }

  // Completes the work if it has no operation left, before another thread has it; true then.
  bool has_ended_alone() {
    if (!ids_.empty() || !parts_.empty()) {
      return false;
    }
    if (!copies_.empty() || recordFunctionEndCallback_) {
      complete();
      return !exception_;
    }
    held_.clear();
    leave_starter();
    completed_ = true;
    state_.store(DONE, std::memory_order_release);
    return true;
  }

  // Runs signal handlers, so that Ctrl-C ends a wait.
  void check_signals() {
    if (Py_IsInitialized() && PyGILState_GetThisThreadState() != nullptr) {
      // Another thread may hold the GIL for long, while peers need progress here.
      leave_to_leader();
      run_signal_handlers();
    }
  }

  // Number of callbacks around the call that started this work, on whatever threads.
  size_t depth() const {
    return depth_;
  }

  // True for a collective: all ranks start it in one order with the others.
  bool is_ordered() {
    auto type = retrieveOpType();
    return !c10d::isP2POp(type) && type != c10d::OpType::COALESCED;
  }

  // Completes the future, which runs the callbacks, as part of `run`, or in a new run if null. They may take the GIL.
  void run_callbacks(std::shared_ptr<CallbackRun> run) {
    InCallback in_callback(run ? std::move(run) : std::make_shared<CallbackRun>(depth_));
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      future = future_;
      error = exception_;
    }
    try {
      if (error) {
        future->setError(error);
      } else {
        future->markCompleted(at::IValue(outputs_));
      }
    } catch (const std::exception& thrown) {
      TORCH_WARN("weft: ", name_, ": a callback of its future has thrown: ", thrown.what());
    }
  }

  // True if an operation was waited for when it was started, and goes on.
  bool is_late = false;
  // True if the engine keeps this work alive, and if its leader completes it. Guarded by the engine's mutex.
  bool is_listed = false;
  bool is_asynchronous = false;

 private:
  enum State : int { PENDING, ENDING, DONE };

  // Fails the work and the group if the deadline has passed; true then.
  bool fail_after_deadline(const std::string& reason) {
    if (Clock::now() < deadline_.load()) {
      return false;
    }
    // Begun before the poison: another thread that finds the group poisoned would end the work with that.
    if (begin_end()) {
      auto text = c10::str("timed out after ", timeout_.count(), " ms: ", reason);
      auto first = engine_->record_failure(text);
      engine_->poison(c10::str(name_, " of rank ", rank_, " ", text));
      keep_memory();
      end(backend_error(c10::str("weft: ", name_, ": ", first)));
    }
    return true;
  }

  // Lets the engine's leader complete this work.
  void leave_to_leader() {
    engine_->add(c10::intrusive_ptr<WeftWork>::unsafe_reclaim_from_nonowning(this), true);
  }

  void wait_until_complete(Milliseconds timeout) {
    engine_->check_not_forked(name_);
    WithoutGil without_gil;
    auto limit = timeout > kNoTimeout ? time_after(timeout) : NEVER;
    if (limit == NEVER && deadline_.load() == NEVER) {
      auto none = NEVER;
      deadline_.compare_exchange_strong(none, time_after(timeout_));
    }
    while (state_.load(std::memory_order_acquire) != DONE) {
      auto now = Clock::now();
      if (now >= limit) {
        std::rethrow_exception(backend_error(c10::str(
            name_, " is not done after ", timeout.count(), " ms; it goes on, and may be waited for again")));
      }
      auto slice = std::chrono::ceil<Milliseconds>(std::min(limit, deadline_.load()) - now);
      if (!progress(std::max(std::min(slice, SIGNAL_INTERVAL), Milliseconds(0)))) {
        check_signals();
      }
    }
  }

  // True for the one thread that ends the work; others return once it has.
  bool begin_end() {
    int expected = PENDING;
    if (state_.compare_exchange_strong(expected, ENDING, std::memory_order_acq_rel)) {
      return true;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait(lock, [this] { return completed_; });
    return false;
  }

  void copy_results() {
    if (copies_.empty()) {
      return;
    }
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    for (auto& [to, from] : copies_) {
      to.copy_(from);
    }
  }

  void end(std::exception_ptr error) {
    copies_.clear();
    held_.clear();
    leave_starter();
    auto self = c10::intrusive_ptr<WeftWork>::unsafe_reclaim_from_nonowning(this);
    // Sets completed_ and wakes waiting threads.
    finish(error);
    state_.store(DONE, std::memory_order_release);
    engine_->remove(*this);
    settle_future();
  }

  // Completes the future, if there is one.
  void settle_future() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!future_ || future_settled_) {
        return;
      }
      future_settled_ = true;
    }
    engine_->settle(c10::intrusive_ptr<WeftWork>::unsafe_reclaim_from_nonowning(this));
  }

  // Ends this work's part in the callback that started it.
  void leave_starter() {
    if (auto starter = std::move(starter_)) {
      starter->in_flight -= 1;
    }
  }

  std::shared_ptr<Engine> engine_;
  const char* name_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  c10::SmallVector<uint64_t, 2> ids_;
  std::vector<c10::intrusive_ptr<WeftWork>> parts_;
  size_t prune_at_ = 64;
  Milliseconds timeout_;
  std::atomic<Clock::time_point> deadline_;
  uint64_t sequence_;
  size_t depth_;
  std::shared_ptr<CallbackRun> starter_;
  std::atomic<int> state_{PENDING};
  std::atomic<int> source_{-1};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_settled_ = false;
};

} // namespace weft
