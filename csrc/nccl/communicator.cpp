// A NCCL communicator of our own, for fmoe_ext/ep/exchange.py: one for each process group and device, made
// from an ncclUniqueId that the group hands round. It knows no torch: buffers and streams are addresses;
// their order and lifetime are the caller's responsibility.
//
// A dead peer ends in an error and not in a hang. The communicator is non-blocking: a call that does not
// finish within the timeout aborts it and throws. An exchange that is under way is watched: one that does
// not end within the timeout is aborted, so that copies to the host that wait for it return, and check()
// throws. Replays of a captured exchange are not watched.

#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <nccl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "driver_events.h"
#include "watchdog.h"

namespace fmoe_ext {
namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

// How long finish() polls, without sleeping, a call that goes on in NCCL's own thread; as a rule it ends
// within microseconds.
constexpr std::chrono::milliseconds kSpin(1);

class Communicator {
 public:
  // max_blocks: thread blocks that an exchange takes at most
  Communicator(const std::string& id, int num_ranks, int rank, double timeout, int max_blocks)
      : num_ranks_(num_ranks),
        rank_(rank),
        timeout_(timeout),
        watchdog_(
            std::chrono::duration<double>(timeout), [this] { return async_error(); }, [this] { abort(); }) {
    if (id.size() != sizeof(ncclUniqueId))
      throw std::invalid_argument("id must have " + std::to_string(sizeof(ncclUniqueId)) +
                                  " bytes, but has " + std::to_string(id.size()));
    if (rank < 0 || rank >= num_ranks)
      throw std::invalid_argument("rank must be in [0, " + std::to_string(num_ranks) + "), but is " +
                                  std::to_string(rank));
    ncclUniqueId unique;
    id.copy(reinterpret_cast<char*>(&unique), sizeof(unique));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = max_blocks;
    const std::lock_guard lock(mutex_);
    finish(ncclCommInitRankConfig(&comm_, num_ranks, unique, rank, &config), "ncclCommInitRankConfig");
    const std::lock_guard lock_all(all_mutex());
    all().insert(this);
  }

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ~Communicator() {
    watchdog_.stop();
    {
      const std::lock_guard lock(all_mutex());
      all().erase(this);
    }
    abort();
  }

  // When the interpreter ends: what is left is the driver's to clean up, for NCCL and CUDA may be gone before
  // the destructors run.
  static void let_go_of_all() {
    const std::lock_guard lock_all(all_mutex());
    for (Communicator* communicator : all()) {
      communicator->watchdog_.stop();
      const std::lock_guard lock(communicator->mutex_);
      communicator->comm_ = nullptr;
    }
  }

  // Exchanges rows of several buffers with every rank. A buffer holds the ranks' blocks in order; all
  // messages, one for each peer and buffer, are one NCCL group. row_bytes: of each buffer.
  void all_to_all(std::vector<uintptr_t> send, const std::vector<size_t>& send_rows,
                  std::vector<uintptr_t> recv, const std::vector<size_t>& recv_rows,
                  const std::vector<size_t>& row_bytes, uintptr_t stream) {
    check();
    std::unique_lock lock(mutex_);
    check_open();
    if (send_rows.size() != static_cast<size_t>(num_ranks_) || recv_rows.size() != send_rows.size())
      throw std::invalid_argument("send_rows and recv_rows must have " + std::to_string(num_ranks_) +
                                  " numbers, but have " + std::to_string(send_rows.size()) + " and " +
                                  std::to_string(recv_rows.size()));
    if (recv.size() != send.size() || row_bytes.size() != send.size())
      throw std::invalid_argument("send, recv and row_bytes must have one number for each buffer, but have " +
                                  std::to_string(send.size()) + ", " + std::to_string(recv.size()) + " and " +
                                  std::to_string(row_bytes.size()));
    auto cuda_stream = reinterpret_cast<cudaStream_t>(stream);
    finish(ncclGroupStart(), "ncclGroupStart");
    ncclResult_t queued = ncclSuccess;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      for (size_t i = 0; i < send.size(); ++i) {
        const size_t sent = send_rows[peer] * row_bytes[i], received = recv_rows[peer] * row_bytes[i];
        if (sent > 0)
          keep_error(queued, ncclSend(reinterpret_cast<const void*>(send[i]), sent, ncclUint8, peer, comm_,
                                      cuda_stream));
        if (received > 0)
          keep_error(queued, ncclRecv(reinterpret_cast<void*>(recv[i]), received, ncclUint8, peer, comm_,
                                      cuda_stream));
        send[i] += sent;
        recv[i] += received;
      }
    }
    const ncclResult_t ended = ncclGroupEnd();
    finish(queued == ncclSuccess ? ended : queued, "the exchange (ncclSend, ncclRecv)");
    if (is_capturing(cuda_stream)) return;  // it runs when the graph is replayed, unwatched
    const RecordedEvent done(cuda_stream);
    lock.unlock();  // the watchdog asks for it while it holds its own
    watchdog_.watch(on_rank("the exchange (ncclSend, ncclRecv)"), [done] { return done.is_done(); });
  }

  // Throws what ended the communicator, if anything did; does not wait. Whatever was exchanged since the last
  // check must not be used if it throws.
  void check() const {
    if (const std::string failure = watchdog_.failure(); !failure.empty()) throw std::runtime_error(failure);
  }

  // The error that NCCL reports of the communicator, without waiting; empty if there is none.
  std::string async_error() {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return "";
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
    if (result != ncclSuccess) return ncclGetErrorString(result);
    return state == ncclSuccess || state == ncclInProgress ? "" : text_of(state);
  }

  void abort() {
    const std::lock_guard lock(mutex_);
    abort_locked();
  }

  // Waits for what is under way; all ranks call it.
  void destroy() {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    finish(ncclCommFinalize(comm_), "ncclCommFinalize");
    ncclCommDestroy(comm_);
    comm_ = nullptr;
  }

  bool is_open() const {
    const std::lock_guard lock(mutex_);
    return comm_ != nullptr;
  }
  int rank() const { return rank_; }
  int size() const { return num_ranks_; }

 private:
  static std::mutex& all_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::set<Communicator*>& all() {  // with all_mutex() held
    static std::set<Communicator*> communicators;
    return communicators;
  }
  void abort_locked() {
    if (comm_ == nullptr) return;
    ncclCommAbort(comm_);
    comm_ = nullptr;
  }
  std::string on_rank(const char* call) const {
    return std::string(call) + " on rank " + std::to_string(rank_) + " of " + std::to_string(num_ranks_);
  }
  void check_open() const {
    if (comm_ == nullptr) throw std::runtime_error("this communicator was aborted or destroyed");
  }

  // Inside a group a call may answer ncclInProgress; only the end of the group can be waited for.
  static void keep_error(ncclResult_t& kept, ncclResult_t result) {
    if (kept == ncclSuccess && result != ncclInProgress) kept = result;
  }

  std::string text_of(ncclResult_t result) const {
    return std::string(ncclGetErrorString(result)) + " (" + ncclGetLastError(comm_) + ")";
  }

  void finish(ncclResult_t result, const char* call) {  // with the mutex held
    const auto start = Clock::now(), deadline = start + std::chrono::duration_cast<Clock::duration>(
                                                            std::chrono::duration<double>(timeout_));
    while (result == ncclInProgress && comm_ != nullptr) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
      result = asked == ncclSuccess ? state : asked;
      if (result != ncclInProgress) break;
      const auto now = Clock::now();
      if (now > deadline) {
        abort_locked();
        std::ostringstream text;
        text << on_rank(call) << " took more than " << timeout_
             << " s: a rank has ended or did not reach this call";
        throw std::runtime_error(text.str());
      }
      if (now < start + kSpin)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (result == ncclSuccess) return;
    const std::string text = text_of(result);
    abort_locked();
    throw std::runtime_error(on_rank(call) + " failed: " + text);
  }

  ncclComm_t comm_ = nullptr;
  mutable std::mutex mutex_;  // of comm_, and of every call with it
  int num_ranks_;
  int rank_;
  double timeout_;
  Watchdog watchdog_;  // last: it ends before what it uses
};

py::bytes make_unique_id() {
  ncclUniqueId id;
  const ncclResult_t result = ncclGetUniqueId(&id);
  if (result != ncclSuccess)
    throw std::runtime_error(std::string("ncclGetUniqueId failed: ") + ncclGetErrorString(result));
  return py::bytes(reinterpret_cast<const char*>(&id), sizeof(id));
}

int nccl_version() {
  int version = 0;
  ncclGetVersion(&version);
  return version;
}

}  // namespace

PYBIND11_MODULE(_C_nccl, m) {
  m.doc() = "NCCL communicators for fmoe_ext.ep.exchange";
  py::module_::import("atexit").attr("register")(py::cpp_function(&Communicator::let_go_of_all));
  m.def("make_unique_id", &make_unique_id);
  m.def("nccl_version", &nccl_version);
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Communicator>(m, "Communicator")
      .def(py::init<const std::string&, int, int, double, int>(), py::arg("id"), py::arg("num_ranks"),
           py::arg("rank"), py::arg("timeout"), py::arg("max_blocks"), unlocked)
      .def("all_to_all", &Communicator::all_to_all, py::arg("send"), py::arg("send_rows"), py::arg("recv"),
           py::arg("recv_rows"), py::arg("row_bytes"), py::arg("stream"), unlocked)
      .def("check", &Communicator::check, unlocked)
      .def("async_error", &Communicator::async_error, unlocked)
      .def("abort", &Communicator::abort, unlocked)
      .def("destroy", &Communicator::destroy, unlocked)
      .def_property_readonly("is_open", py::cpp_function(&Communicator::is_open, unlocked))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size);
}

}  // namespace fmoe_ext
