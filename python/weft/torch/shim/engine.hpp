// Progress engine for one group: C table context, works in flight, and the threads that complete asynchronous ones.
//
// One thread at a time, the leader, completes works. Callbacks on futures are user code and may block, also on works in
// this group: before the leader runs them it gives up the lead, and an idle thread or a new one takes over.
#pragma once

#include "callback.hpp"
#include "weft.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <Python.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace weft {

class WeftWork;

// The calling thread's last error text.
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

// Aborts in this process, which end groups that are being formed.
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

// Time `timeout` from now, limited to what the clock can represent.
inline Clock::time_point time_after(Milliseconds timeout) {
  return Clock::now() + std::min(timeout, Milliseconds(std::chrono::hours(24 * 36500)));
}

// Number of forks between program start and this process.
inline std::atomic<uint64_t>& forks() {
  static std::atomic<uint64_t> count{0};
  static int watched = pthread_atfork(nullptr, nullptr, [] { count += 1; });
  (void)watched;
  return count;
}

// Shared by a backend and the works; closes the group when the backend does, frees it with the last work.
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

  // Starts the first thread. Call once.
  void start();
  // Throws if the group was closed or aborted, or this process was forked after the group was made.
  void check_open(const char* name) const;
  // Throws in a process that was forked after the group was made, which lacks the threads and owns no connection.
  void check_not_forked(const char* name) const;

  // Keeps a started work alive until it is complete; the leader completes an asynchronous one. Fails it if the group
  // was closed meanwhile.
  void add(const c10::intrusive_ptr<WeftWork>& work, bool is_asynchronous);
  void remove(WeftWork& work);
  // Runs the callbacks on a complete work's future: at once on a program thread, in order on the leader.
  void settle(const c10::intrusive_ptr<WeftWork>& work);
  // Keeps memory from failed operations until the end: peers may still access it.
  void keep(std::vector<at::Tensor> tensors);

  // Ends the group at every rank with this text.
  void poison(const std::string& text);
  // Ends the group at every rank; calls and waits raise from now on.
  void abort();
  // Sets the first step of `close`.
  void before_close(std::function<void()> step);
  // Fails all works in flight, leaves the group and ends the threads; a second call has no effect. Waits for running
  // callbacks, unless a callback calls it. Throws a signal handler's exception that ended this wait.
  void close(const std::string& reason);
  // Same as `close`, for destructors: such an exception is printed.
  void close_quietly(const std::string& reason) noexcept;
  // Records an error that ended the group; returns the first one.
  std::string record_failure(const std::string& text);
  bool has_failed() const;

 private:
  using WorkPointer = c10::intrusive_ptr<WeftWork>;
  using Works = std::list<WorkPointer>;

  // Callbacks with one depth.
  struct Callbacks {
    std::vector<CallbackRun*> running;
    // Complete works whose callbacks wait for a running one.
    std::deque<WorkPointer> due;
  };

  // Thread functions. With a lock as an argument they hold it when they begin and end.
  void run();
  void lead(std::unique_lock<std::mutex>& lock);
  void call(WorkPointer work);
  WorkPointer take_overdue();
  bool needs_leader() const {
    return asynchronous_ > 0 || due_ > 0;
  }
  void find_leader();
  void spawn();
  // True once no thread is left; false after a limit, and after a signal, whose exception is stored.
  bool wait_for_threads(std::exception_ptr& interrupt);

  bool is_forked() const {
    return forks().load(std::memory_order_relaxed) != forks_;
  }

  // The engine that the calling thread leads; null for other threads.
  static Engine*& led() {
    static thread_local Engine* engine = nullptr;
    return engine;
  }

  // True on engine threads.
  static bool& is_own_thread() {
    static thread_local bool is = false;
    return is;
  }

  // A forked process does not touch these: the threads are the parent's, which may hold the mutex and wait.
  struct Shared {
    std::mutex mutex;
    // Threads without the lead wait for it, the leader for works, and `close` until threads end.
    std::condition_variable wake, work, ended;
    // Threads, with those that are idle or start.
    size_t threads = 0;
  };

  const weft_table* table_;
  void* context_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  Works works_;
  size_t asynchronous_ = 0;
  // Threads that wait for the lead or start; true if one leads.
  size_t idle_ = 0;
  bool is_led_ = false;
  // By depth, and the number that are due at all depths.
  std::map<size_t, Callbacks> callbacks_;
  size_t due_ = 0;
  Clock::time_point looked_at_{};
  std::vector<at::Tensor> kept_;
  std::string failure_;
  std::function<void()> before_close_;
  bool stop_ = false;
  uint64_t forks_ = forks().load();
  std::atomic<bool> closed_{false};
};

} // namespace weft
