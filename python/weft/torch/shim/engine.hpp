// Progress of one group: its context of the C table, works in flight, and the thread that completes asynchronous ones.
#pragma once

#include "weft.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <Python.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace weft {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class WeftWork;

// Text of the calling thread's last error.
inline std::string last_error(const weft_table& table) {
  std::string text(2048, '\0');
  text.resize(std::min(table.last_error(text.data(), text.size()), text.size() - 1));
  return text;
}

inline std::exception_ptr backend_error(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, text);
  } catch (...) {
    return std::current_exception();
  }
}

// Aborts of this process, which end groups that are being formed.
inline std::atomic<uint64_t> aborts{0};

// The GIL is released while this lives, if the thread holds it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Time `timeout` from now; a longest one, which the clock can represent, for more.
inline Clock::time_point time_after(Milliseconds timeout) {
  return Clock::now() + std::min(timeout, Milliseconds(std::chrono::hours(24 * 36500)));
}

// Number of forks between the start of the program and this process.
inline std::atomic<uint64_t>& forks() {
  static std::atomic<uint64_t> count{0};
  static int watched = pthread_atfork(nullptr, nullptr, [] { count += 1; });
  (void)watched;
  return count;
}

// Shared by a backend and its works; closes the group when the backend does, frees it with the last work.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(const weft_table* table, void* context);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const weft_table& table() const {
    return *table_;
  }

  void* context() const {
    return context_;
  }

  // Throws if the group was closed or aborted, or this process was forked after the group was made.
  void check_open(const char* name) const;
  // Throws in a process that was forked after the group was made, which lacks the thread and owns no connection.
  void check_not_forked(const char* name) const;

  // Keeps a started work alive until it is complete; the thread completes an asynchronous one. Fails it if the group
  // was closed meanwhile.
  void add(const c10::intrusive_ptr<WeftWork>& work, bool is_asynchronous);
  void remove(WeftWork& work);
  // Keeps memory of failed operations until the end: peers may still access it.
  void keep(std::vector<at::Tensor> tensors);

  // Ends the group at every rank with this text.
  void poison(const std::string& text);
  // Ends the group at every rank; calls and waits raise from now on.
  void abort();
  // Sets the first step of `close`.
  void before_close(std::function<void()> step);
  // Fails all works in flight, leaves the group and ends the thread; a second call has no effect.
  void close(const std::string& reason);
  // Records an error that ended the group; returns the first one.
  std::string record_failure(const std::string& text);
  bool has_failed() const;

 private:
  using Works = std::list<c10::intrusive_ptr<WeftWork>>;

  void run();
  bool is_forked() const {
    return forks().load(std::memory_order_relaxed) != forks_;
  }

  // A forked process leaves these alone: the thread is the parent's, which may hold the mutex and wait.
  struct Shared {
    std::mutex mutex;
    std::condition_variable wake;
    std::thread thread;
  };

  const weft_table* table_;
  void* context_;
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
  Works works_;
  size_t asynchronous_ = 0;
  std::vector<at::Tensor> kept_;
  std::string failure_;
  std::function<void()> before_close_;
  bool stop_ = false;
  uint64_t forks_ = forks().load();
  std::atomic<bool> closed_{false};
};

} // namespace weft
