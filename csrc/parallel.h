// How all CPU operators share work among threads, of torch's own pool: for_each_job(). Results must not
// depend on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

#include <torch/csrc/stable/ops.h>

#include "batch_invariant.h"

namespace fmoe_ext {

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

// Calls body(job), or body(job, worker), once for each job in [0, num_jobs); threads take the next job as
// they become free. Jobs that run at the same time have different workers, all below num_threads() and
// num_jobs. If jobs throw, the exception of the lowest one is rethrown here; with several threads the other
// jobs run nevertheless.
template <class Body>
void for_each_job(int64_t num_jobs, const Body& body_) {
  const auto body = [&](int64_t job, int64_t worker) {
    if constexpr (std::is_invocable_v<Body, int64_t, int64_t>)
      body_(job, worker);
    else
      body_(job);
  };
  const int64_t workers = std::min<int64_t>(num_threads(), num_jobs);
  if (workers <= 1) {
    for (int64_t job = 0; job < num_jobs; ++job) body(job, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  int64_t error_job = num_jobs;
  const bool invariant = is_batch_invariant();
  torch::stable::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    const AsOnCaller mode(invariant);
    for (int64_t job; (job = next.fetch_add(1, std::memory_order_relaxed)) < num_jobs;) {
      try {
        body(job, worker);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (job < error_job) {
          error_job = job;
          error = std::current_exception();
        }
      }
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace fmoe_ext
