// Functions of Engine: the list of works in flight and the thread that completes asynchronous ones.
#pragma once

#include "work.hpp"

namespace weft {

constexpr const char* FORKED =
    "this process was forked after the process group was made: expected a new process; start workers with the spawn or "
    "forkserver method";
// Longest wait of the thread for its oldest work: one that is done before it is completed this much later at most.
constexpr Milliseconds OUT_OF_ORDER{2};

inline Engine::Engine(const weft_table* table, void* context) : table_(table), context_(context) {
  shared_->thread = std::thread([this] { run(); });
}

inline Engine::~Engine() {
  if (is_forked()) {
    // The destructor of a condition variable waits for its waiters, which this process lacks.
    (void)shared_.release();
    return;
  }
  close("the process group was destroyed");
  table_->release(context_);
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
  // A lock may be held by a thread that this process lacks, so none is taken here.
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
        shared_->wake.notify_one();
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
  WithoutGil without_gil;
  record_failure(reason);
  if (before_close_) {
    before_close_();
  }
  std::vector<c10::intrusive_ptr<WeftWork>> left;
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    stop_ = true;
    shared_->wake.notify_one();
  }
  table_->end_waits(context_);
  // A callback of a future may close the group on the thread itself.
  if (shared_->thread.get_id() == std::this_thread::get_id()) {
    shared_->thread.detach();
  } else {
    shared_->thread.join();
  }
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    left.assign(works_.begin(), works_.end());
  }
  for (auto& work : left) {
    work->fail(reason, true);
  }
  table_->close(context_);
}

inline void Engine::run() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (true) {
    shared_->wake.wait(lock, [this] { return stop_ || asynchronous_ > 0; });
    if (stop_) {
      return;
    }
    std::vector<c10::intrusive_ptr<WeftWork>> works;
    for (auto& work : works_) {
      if (work->is_asynchronous) {
        works.push_back(work);
      }
    }
    lock.unlock();
    // A callback may close the group here, and a work may be the last owner of the engine then.
    auto self = shared_from_this();
    bool completed = false;
    for (auto& work : works) {
      completed |= work->is_done() && work->progress(Milliseconds(0));
    }
    if (!completed) {
      works.front()->progress(OUT_OF_ORDER);
    }
    works.clear();
    lock.lock();
    if (stop_) {
      lock.unlock();
      return;
    }
  }
}

} // namespace weft
