// Engine functions: the list of works in flight and the threads that complete asynchronous ones.
#pragma once

#include "work.hpp"

namespace weft {

constexpr const char* FORKED =
    "this process was forked after the process group was made: expected a new process; start workers with the spawn or "
    "forkserver method";
// Longest wait by the leader for the oldest work: a work that is done before it is completed at most this much later.
constexpr Milliseconds OUT_OF_ORDER{2};
// Maximum blocked callbacks of one depth that run at once; more wait until one returns.
constexpr size_t MOST_CALLBACKS = 32;
// Time between two checks by the leader for callbacks that are blocked while others are due.
constexpr Milliseconds LOOK_INTERVAL{20};
// Time without the lead after which a thread ends, unless it is the only idle one.
constexpr Milliseconds IDLE_TIME{5000};
// Longest wait for running callbacks when a group closes.
constexpr Milliseconds CLOSE_TIME{30000};

inline Engine::Engine(const weft_table* table, void* context) : table_(table), context_(context) {}

inline Engine::~Engine() {
  if (is_forked()) {
    // The condition variable's destructor waits for its waiters, which this process lacks.
    (void)new std::shared_ptr<Shared>(shared_);
    return;
  }
  close_quietly("the process group was destroyed");
  table_->release(context_);
}

inline void Engine::start() {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  try {
    spawn();
  } catch (const std::system_error& error) {
    std::rethrow_exception(backend_error(c10::str(
        "weft: cannot start the thread of a process group: ", error.what(), "; raise the limit of processes (`ulimit -u`)")));
  }
}

inline void Engine::check_open(const char* name) const {
  check_not_forked(name);
  if (!closed_.load(std::memory_order_relaxed)) {
    return;
  }
  std::lock_guard<std::mutex> lock(shared_->mutex);
  std::rethrow_exception(backend_error(c10::str("weft: ", name, ": ", failure_)));
}

inline void Engine::check_not_forked(const char* name) const {
  // A thread that this process lacks may hold a lock, so none is taken here.
  if (is_forked()) {
    std::rethrow_exception(backend_error(c10::str("weft: ", name, ": ", FORKED)));
  }
}

inline void Engine::add(const c10::intrusive_ptr<WeftWork>& work, bool is_asynchronous) {
  std::string reason;
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    if (work->is_complete()) {
      return;
    }
    if (!stop_) {
      if (!work->is_listed) {
        work->is_listed = true;
        works_.push_back(work);
      }
      if (is_asynchronous && !work->is_asynchronous) {
        work->is_asynchronous = true;
        asynchronous_ += 1;
        find_leader();
      }
      return;
    }
    reason = failure_;
  }
  work->fail(reason, true);
}

inline void Engine::remove(WeftWork& work) {
  c10::intrusive_ptr<WeftWork> removed;
  std::lock_guard<std::mutex> lock(shared_->mutex);
  if (work.is_asynchronous) {
    asynchronous_ -= 1;
  }
  for (auto each = works_.begin(); each != works_.end(); ++each) {
    if (each->get() == &work) {
      removed = std::move(*each);
      works_.erase(each);
      return;
    }
  }
}

inline void Engine::keep(std::vector<at::Tensor> tensors) {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  std::move(tensors.begin(), tensors.end(), std::back_inserter(kept_));
}

inline void Engine::poison(const std::string& text) {
  table_->poison(context_, text.c_str());
}

inline std::string Engine::record_failure(const std::string& text) {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  if (failure_.empty()) {
    failure_ = text;
  }
  return failure_;
}

inline bool Engine::has_failed() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  return !failure_.empty();
}

inline void Engine::abort() {
  auto text = c10::str("rank ", table_->rank, " aborted the group");
  record_failure(text);
  poison(text);
  close(text);
}

inline void Engine::before_close(std::function<void()> step) {
  before_close_ = std::move(step);
}

inline void Engine::close(const std::string& reason) {
  if (is_forked() || closed_.exchange(true)) {
    return;
  }
  std::exception_ptr interrupt;
  {
    WithoutGil without_gil;
    record_failure(reason);
    if (before_close_) {
      before_close_();
    }
    std::vector<WorkPointer> left, due;
    {
      std::lock_guard<std::mutex> lock(shared_->mutex);
      stop_ = true;
      left.assign(works_.begin(), works_.end());
      for (auto& [depth, callbacks] : callbacks_) {
        std::move(callbacks.due.begin(), callbacks.due.end(), std::back_inserter(due));
        callbacks.due.clear();
      }
      due_ = 0;
      shared_->wake.notify_all();
      shared_->work.notify_all();
    }
    table_->end_waits(context_);
    // Callbacks that run may wait for these.
    for (auto& work : due) {
      work->run_callbacks(nullptr);
    }
    for (auto& work : left) {
      work->fail(reason, true);
    }
    // A callback that closes the group is on one of the threads, or its thread waits for one of them.
    if (!CallbackRun::current() && !is_own_thread() && !wait_for_threads(interrupt) && !interrupt) {
      TORCH_WARN(
          "weft: a callback of a future still runs ", CLOSE_TIME.count(), " ms after the end of its process group; it goes on");
    }
    table_->close(context_);
  }
  if (interrupt) {
    std::rethrow_exception(interrupt);
  }
}

inline void Engine::close_quietly(const std::string& reason) noexcept {
  try {
    close(reason);
  } catch (pybind11::error_already_set& error) {
    pybind11::gil_scoped_acquire gil;
    error.discard_as_unraisable("the end of a process group");
  } catch (const std::exception& error) {
    TORCH_WARN("weft: the end of a process group: ", error.what());
  }
}

inline bool Engine::wait_for_threads(std::exception_ptr& interrupt) {
  auto until = time_after(CLOSE_TIME);
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (!shared_->ended.wait_for(lock, SIGNAL_INTERVAL, [this] { return shared_->threads == 0; })) {
    if (Clock::now() >= until) {
      return false;
    }
    lock.unlock();
    try {
      run_signal_handlers();
    } catch (...) {
      interrupt = std::current_exception();
      return false;
    }
    lock.lock();
  }
  return true;
}

// Makes a thread take the lead, or wakes the leader.
inline void Engine::find_leader() {
  if (is_led_) {
    shared_->work.notify_one();
  } else if (idle_ > 0) {
    shared_->wake.notify_one();
  } else {
    try {
      spawn();
    } catch (const std::system_error& error) {
      // A callback that waits for a future keeps this group's works in flight until it returns.
      TORCH_WARN_ONCE(
          "weft: no thread to complete works beside a callback: ", error.what(), "; raise the limit of processes (`ulimit -u`)");
    }
  }
}

inline void Engine::spawn() {
  std::thread([self = shared_from_this()]() mutable {
    auto shared = self->shared_;
    self->run();
    // `close` returns once no thread has the engine.
    self.reset();
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->threads -= 1;
    shared->ended.notify_all();
  }).detach();
  shared_->threads += 1;
  idle_ += 1;
}

inline void Engine::run() {
  pthread_setname_np(pthread_self(), "weft-torch");
  is_own_thread() = true;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  auto is_due = [this] { return stop_ || (!is_led_ && needs_leader()); };
  while (true) {
    // Both `spawn` and the end of this loop count it.
    bool is_woken = true;
    if (idle_ == 1) {
      shared_->wake.wait(lock, is_due);
    } else {
      is_woken = shared_->wake.wait_for(lock, IDLE_TIME, is_due);
    }
    if (stop_ || (!is_woken && idle_ > 1)) {
      break;
    }
    if (!is_woken) {
      continue;
    }
    idle_ -= 1;
    is_led_ = true;
    led() = this;
    lead(lock);
    if (led() == this) {
      led() = nullptr;
      is_led_ = false;
    }
    idle_ += 1;
  }
  idle_ -= 1;
}

// Completes works until there are none, or until this thread has lost the lead.
inline void Engine::lead(std::unique_lock<std::mutex>& lock) {
  while (!stop_ && led() == this && needs_leader()) {
    if (auto overdue = take_overdue()) {
      lock.unlock();
      call(std::move(overdue));
      lock.lock();
      continue;
    }
    if (asynchronous_ == 0) {
      shared_->work.wait_for(lock, LOOK_INTERVAL);
      continue;
    }
    std::vector<WorkPointer> works;
    for (auto& work : works_) {
      if (work->is_asynchronous) {
        works.push_back(work);
      }
    }
    lock.unlock();
    bool completed = false;
    std::set<size_t> unfinished;
    for (auto& work : works) {
      // Collectives with one depth end in order, so that callbacks run alike on all ranks.
      bool is_ordered = work->is_ordered();
      if ((is_ordered && unfinished.count(work->depth()) > 0) || !work->is_done()) {
        if (is_ordered) {
          unfinished.insert(work->depth());
        }
        continue;
      }
      completed |= work->progress(Milliseconds(0));
      if (led() != this) {
        break;
      }
    }
    if (!completed && led() == this) {
      works.front()->progress(OUT_OF_ORDER);
    }
    works.clear();
    lock.lock();
  }
}

inline void Engine::settle(const WorkPointer& work) {
  if (led() != this) {
    work->run_callbacks(nullptr);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    auto& callbacks = callbacks_[work->depth()];
    // In order: ranks whose callbacks start collectives start them alike.
    if (!stop_ && (!callbacks.running.empty() || !callbacks.due.empty())) {
      callbacks.due.push_back(work);
      due_ += 1;
      return;
    }
  }
  call(work);
}

// Gives up the lead and runs the callbacks on a work's future, then the due ones at that depth.
inline void Engine::call(WorkPointer work) {
  auto depth = work->depth();
  auto run = std::make_shared<CallbackRun>(depth);
  std::unique_lock<std::mutex> lock(shared_->mutex);
  auto& callbacks = callbacks_[depth];
  callbacks.running.push_back(run.get());
  led() = nullptr;
  is_led_ = false;
  if (!stop_ && needs_leader()) {
    find_leader();
  }
  while (true) {
    lock.unlock();
    work->run_callbacks(run);
    work.reset();
    auto next = std::make_shared<CallbackRun>(depth);
    lock.lock();
    auto place = std::find(callbacks.running.begin(), callbacks.running.end(), run.get());
    if (callbacks.due.empty()) {
      callbacks.running.erase(place);
      if (callbacks.running.empty()) {
        // An endless chain of callbacks has endless depths.
        callbacks_.erase(depth);
      }
      return;
    }
    work = std::move(callbacks.due.front());
    callbacks.due.pop_front();
    due_ -= 1;
    *place = next.get();
    run = std::move(next);
  }
}

// A work whose callbacks are due while all running ones at that depth are blocked; null if there is none.
inline Engine::WorkPointer Engine::take_overdue() {
  auto now = Clock::now();
  if (due_ == 0 || now - looked_at_ < LOOK_INTERVAL) {
    return {};
  }
  looked_at_ = now;
  for (auto& [depth, callbacks] : callbacks_) {
    if (callbacks.due.empty() || callbacks.running.size() >= MOST_CALLBACKS) {
      continue;
    }
    size_t blocked = 0;
    for (auto run : callbacks.running) {
      // No short-circuit: each of them is checked.
      blocked += run->is_blocked(now);
    }
    if (blocked == callbacks.running.size()) {
      auto work = std::move(callbacks.due.front());
      callbacks.due.pop_front();
      due_ -= 1;
      return work;
    }
  }
  return {};
}

} // namespace weft
