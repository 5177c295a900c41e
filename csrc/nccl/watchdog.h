// Watches collective calls that run on a device, for communicator.cpp, from a thread of its own. If one does
// not end in time, or its library reports an error, the watchdog aborts it: a host thread that waits for it
// (in a copy, for example) would wait for ever otherwise. failure() then says what happened.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace fmoe_ext {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  // error: what went wrong so far, or empty; abort: ends all work. The watchdog's thread calls both, and
  // is_done of watch(); error and is_done under its lock, so a lock that they take must not be held around
  // watch(), failure() or stop().
  Watchdog(Seconds timeout, std::function<std::string()> error, std::function<void()> abort)
      : timeout_(timeout), error_(std::move(error)), abort_(std::move(abort)) {}
  ~Watchdog() { stop(); }
  Watchdog(const Watchdog&) = delete;

  // Watches one piece of work, which must end within the timeout from now, time in the device's queue
  // included. is_done: whether it has ended; throws if it failed. Work ends in the order in which it is
  // watched, so only the oldest is asked.
  void watch(std::string name, std::function<bool()> is_done) {
    const std::lock_guard lock(mutex_);
    if (stopping_ || !failure_.empty()) return;  // nobody looks any more
    tasks_.push_back({std::move(name), std::move(is_done),
                      Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout_)});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
  }
  // Why all work was aborted; empty if it was not.
  std::string failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  // Ends the thread; nothing is aborted after this. error, abort and is_done must not call it: it waits for
  // them.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Task {
    std::string name;
    std::function<bool()> is_done;
    Clock::time_point deadline;
  };
  static constexpr std::chrono::milliseconds kInterval{10};  // between two looks at the oldest

  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_ && failure_.empty()) {
      if (tasks_.empty()) {
        changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
        continue;
      }
      try {
        if (tasks_.front().is_done()) {
          tasks_.pop_front();
          continue;
        }
        failure_ = what_failed();
      } catch (const std::exception& error) {
        failure_ = tasks_.front().name + " failed: " + error.what();
      }
      if (failure_.empty()) changed_.wait_for(lock, kInterval);
    }
    if (failure_.empty()) return;
    tasks_.clear();
    lock.unlock();
    abort_();
  }
  // Why the oldest work, which has not ended, should be aborted; empty: it may go on.
  std::string what_failed() const {
    const Task& task = tasks_.front();
    if (std::string error = error_(); !error.empty()) return task.name + " failed: " + error;
    if (Clock::now() < task.deadline) return "";
    std::ostringstream text;
    text << task.name << " took more than " << timeout_.count()
         << " s: a rank has ended or did not reach this call";
    return text.str();
  }

  const Seconds timeout_;
  const std::function<std::string()> error_;
  const std::function<void()> abort_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;  // the oldest first
  std::string failure_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace fmoe_ext
