// CallbackRun: where a future's callbacks, which are user code, run, and whether they are blocked.
#pragma once

#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

namespace weft {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Time without a step on its thread after which a callback that has no operation in flight counts as blocked.
constexpr Milliseconds BLOCKED{100};
// Time after which any callback does.
constexpr Milliseconds LONG_BLOCKED{5000};

class CallbackRun {
 public:
  // A run on the calling thread; `depth`: number of runs around it, on whatever threads.
  explicit CallbackRun(size_t depth) : depth_(depth), thread_(static_cast<int>(syscall(SYS_gettid))) {
    has_clock_ = pthread_getcpuclockid(pthread_self(), &clock_) == 0;
  }

  // The innermost run on the calling thread; null outside callbacks.
  static std::shared_ptr<CallbackRun>& current() {
    static thread_local std::shared_ptr<CallbackRun> run;
    return run;
  }

  // Depth for callbacks on works that the calling thread starts.
  static size_t next_depth() {
    return current() ? current()->depth_ + 1 : 0;
  }

  // True if the callbacks wait for something, as far as the system shows. One thread at a time calls it during the run.
  bool is_blocked(Clock::time_point now) {
    auto used = used_nanoseconds();
    if (used != used_ || is_runnable()) {
      used_ = used;
      still_since_ = now;
    }
    bool is_still = now - still_since_ >= BLOCKED && in_flight.load() == 0;
    return is_still || now - begun_ >= LONG_BLOCKED;
  }

  // Works in flight that the callbacks have started.
  std::atomic<int> in_flight{0};

 private:
  int64_t used_nanoseconds() const {
    timespec used{};
    if (!has_clock_ || clock_gettime(clock_, &used) != 0) {
      return 0;
    }
    return used.tv_sec * int64_t{1000000000} + used.tv_nsec;
  }

  // True if the thread would use a core if it had one.
  bool is_runnable() const {
    char path[48], text[96] = "";
    std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread_);
    if (auto file = std::fopen(path, "re")) {
      text[std::fread(text, 1, sizeof text - 1, file)] = '\0';
      std::fclose(file);
    }
    // "7 (name) S ...", where the name may have parentheses.
    auto name = std::strrchr(text, ')');
    return name != nullptr && name[1] == ' ' && name[2] == 'R';
  }

  size_t depth_;
  int thread_;
  bool has_clock_;
  clockid_t clock_{};
  int64_t used_ = -1;
  Clock::time_point begun_ = Clock::now();
  Clock::time_point still_since_ = begun_;
};

// Makes a run the current one while this lives.
class InCallback {
 public:
  explicit InCallback(std::shared_ptr<CallbackRun> run)
      : outer_(std::exchange(CallbackRun::current(), std::move(run))) {}
  ~InCallback() {
    CallbackRun::current() = std::move(outer_);
  }
  InCallback(const InCallback&) = delete;
  InCallback& operator=(const InCallback&) = delete;

 private:
  std::shared_ptr<CallbackRun> outer_;
};

} // namespace weft
