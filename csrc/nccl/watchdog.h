// Watches work that runs on a device: if it does not end in time, or its library reports an error, it is
// aborted. Whoever waits for it on the host, in a copy say, goes on then, and failure() says why.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace fmoe_ext {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  // error: what went wrong so far, or empty; abort: ends all work. Both are called by the watchdog's thread.
  Watchdog(Seconds timeout, std::function<std::string()> error, std::function<void()> abort)
      : timeout_(timeout), error_(std::move(error)), abort_(std::move(abort)) {}
  ~Watchdog() { stop(); }
  Watchdog(const Watchdog&) = delete;

  // is_done: has the work ended? It throws if the work failed. Works end in the order in which they are
  // watched.
  void watch(std::string name, std::function<bool()> is_done) {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    works_.push_back({std::move(name), std::move(is_done),
                      Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout_)});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
  }
  std::string failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  // Nothing is aborted after this; not to be called by the functions that were given.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Work {
    std::string name;
    std::function<bool()> is_done;
    Clock::time_point deadline;
  };
  static constexpr std::chrono::milliseconds kInterval{10};

  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_ && failure_.empty()) {
      if (works_.empty()) {
        changed_.wait(lock, [&] { return stopping_ || !works_.empty(); });
        continue;
      }
      try {
        if (works_.front().is_done()) {
          works_.pop_front();
          continue;
        }
        failure_ = what_failed();
      } catch (const std::exception& error) {
        failure_ = works_.front().name + " failed: " + error.what();
      }
      if (failure_.empty()) changed_.wait_for(lock, kInterval);
    }
    if (failure_.empty()) return;
    works_.clear();
    lock.unlock();
    abort_();
  }
  std::string what_failed() const {
    const Work& work = works_.front();
    if (std::string error = error_(); !error.empty()) return work.name + " failed: " + error;
    if (Clock::now() < work.deadline) return "";
    return work.name + " took more than " + std::to_string(timeout_.count()) +
           " s: a rank has ended or did not reach this call";
  }

  const Seconds timeout_;
  const std::function<std::string()> error_;
  const std::function<void()> abort_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> works_;
  std::string failure_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace fmoe_ext
