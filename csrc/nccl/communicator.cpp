// A NCCL communicator of our own: one for each process group and device, made from a ncclUniqueId that the
// group hands round. It knows no torch: buffers and streams are addresses, their order and lifetime the
// caller's matter.
//
// The communicator is non-blocking: a call that does not come through within the timeout aborts the
// communicator and throws, so that a dead peer ends in an error and not in a hang.

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <nccl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace fmoe_ext {
namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

class Communicator {
 public:
  Communicator(const std::string& id, int num_ranks, int rank, double timeout)
      : num_ranks_(num_ranks), rank_(rank), timeout_(timeout) {
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
    finish(ncclCommInitRankConfig(&comm_, num_ranks, unique, rank, &config), "ncclCommInitRankConfig");
  }

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ~Communicator() {
    if (comm_ != nullptr) ncclCommAbort(comm_);
  }

  // Bytes from and to each rank, blocks one after the other in the order of ranks; one message a peer.
  void all_to_all(uintptr_t send, const std::vector<size_t>& send_bytes, uintptr_t recv,
                  const std::vector<size_t>& recv_bytes, uintptr_t stream) {
    check_open();
    if (send_bytes.size() != static_cast<size_t>(num_ranks_) || recv_bytes.size() != send_bytes.size())
      throw std::invalid_argument("send_bytes and recv_bytes must have " + std::to_string(num_ranks_) +
                                  " numbers, but have " + std::to_string(send_bytes.size()) + " and " +
                                  std::to_string(recv_bytes.size()));
    auto cuda_stream = reinterpret_cast<cudaStream_t>(stream);
    finish(ncclGroupStart(), "ncclGroupStart");
    ncclResult_t queued = ncclSuccess;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (send_bytes[peer] > 0)
        keep_error(queued, ncclSend(reinterpret_cast<const void*>(send), send_bytes[peer], ncclUint8, peer,
                                    comm_, cuda_stream));
      if (recv_bytes[peer] > 0)
        keep_error(queued, ncclRecv(reinterpret_cast<void*>(recv), recv_bytes[peer], ncclUint8, peer, comm_,
                                    cuda_stream));
      send += send_bytes[peer];
      recv += recv_bytes[peer];
    }
    const ncclResult_t ended = ncclGroupEnd();
    finish(queued == ncclSuccess ? ended : queued, "the exchange (ncclSend, ncclRecv)");
  }

  // What went wrong since the last call, without waiting; empty if nothing did.
  std::string async_error() {
    check_open();
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
    if (result != ncclSuccess) return ncclGetErrorString(result);
    return state == ncclSuccess || state == ncclInProgress ? "" : text_of(state);
  }

  void abort() {
    if (comm_ == nullptr) return;
    ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  // Waits for what is under way; all ranks call it.
  void destroy() {
    if (comm_ == nullptr) return;
    finish(ncclCommFinalize(comm_), "ncclCommFinalize");
    ncclCommDestroy(comm_);
    comm_ = nullptr;
  }

  bool is_open() const { return comm_ != nullptr; }
  int rank() const { return rank_; }
  int size() const { return num_ranks_; }

 private:
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

  void finish(ncclResult_t result, const char* call) {
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_);
    while (result == ncclInProgress && comm_ != nullptr) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
      result = asked == ncclSuccess ? state : asked;
      if (result != ncclInProgress) break;
      if (Clock::now() > deadline) {
        abort();
        throw std::runtime_error(std::string(call) + " on rank " + std::to_string(rank_) + " of " +
                                 std::to_string(num_ranks_) + " took more than " + std::to_string(timeout_) +
                                 " s: a rank has ended or did not reach this call");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (result == ncclSuccess) return;
    const std::string text = text_of(result);
    abort();
    throw std::runtime_error(std::string(call) + " on rank " + std::to_string(rank_) + " failed: " + text);
  }

  ncclComm_t comm_ = nullptr;
  int num_ranks_;
  int rank_;
  double timeout_;
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
  m.def("make_unique_id", &make_unique_id);
  m.def("nccl_version", &nccl_version);
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Communicator>(m, "Communicator")
      .def(py::init<const std::string&, int, int, double>(), py::arg("id"), py::arg("num_ranks"),
           py::arg("rank"), py::arg("timeout"), unlocked)
      .def("all_to_all", &Communicator::all_to_all, py::arg("send"), py::arg("send_bytes"), py::arg("recv"),
           py::arg("recv_bytes"), py::arg("stream"), unlocked)
      .def("async_error", &Communicator::async_error)
      .def("abort", &Communicator::abort, unlocked)
      .def("destroy", &Communicator::destroy, unlocked)
      .def_property_readonly("is_open", &Communicator::is_open)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size);
}

}  // namespace fmoe_ext
