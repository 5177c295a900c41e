// NCCL and the CUDA driver without a device. The peers are alive until fake_kill_peers(): what is enqueued
// after that never ends, unless its communicator is aborted.
#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>

#include <cuda.h>

#include "nccl.h"

struct ncclComm {};
struct CUevent_st {
  CUcontext context;
  bool ends;
  int abort_count;  // when it was recorded
};

namespace {
std::atomic<bool> peers_alive{true}, remote_error{false};
std::atomic<int> aborts{0}, max_blocks{0}, groups{0}, messages{0}, polls{0}, polls_left{0};
std::atomic<bool> device_fault{false};
std::atomic<int> query_milliseconds{0}, sleeps{0};
thread_local CUcontext bound = nullptr;  // a thread that CUDA does not know has none
}  // namespace

extern "C" {
void fake_kill_peers() { peers_alive = false; }
void fake_device_fault() { device_fault = true; }
void fake_slow_queries(int milliseconds) { query_milliseconds = milliseconds; }
void fake_bind_context() { bound = reinterpret_cast<CUcontext>(1); }
void fake_remote_error() { remote_error = true; }
int fake_aborts() { return aborts; }
int fake_max_blocks() { return max_blocks; }
int fake_groups() { return groups; }
int fake_messages() { return messages; }
// From now on the end of a group is known when it was asked for so often; 0 ends one that is under way.
void fake_in_progress(int times) { polls = times, polls_left = 0; }
int fake_sleeps() { return sleeps; }
// The module under test is linked with --wrap=nanosleep: its sleeps come here.
int __wrap_nanosleep(const timespec* asked, timespec* left) { return ++sleeps, nanosleep(asked, left); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return *id = {}, ncclSuccess; }
ncclResult_t ncclGetVersion(int* version) { return *version = 22800, ncclSuccess; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int, ncclUniqueId, int, ncclConfig_t* config) {
  max_blocks = config->maxCTAs;
  return *comm = new ncclComm, ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
  if (polls_left > 0) return --polls_left, *state = ncclInProgress, ncclSuccess;
  return *state = remote_error ? ncclRemoteError : ncclSuccess, ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ++aborts, delete comm, ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return delete comm, ncclSuccess; }
ncclResult_t ncclGroupStart() { return ++groups, ncclSuccess; }
ncclResult_t ncclGroupEnd() { return polls_left = polls.load(), polls > 0 ? ncclInProgress : ncclSuccess; }
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ++messages, ncclSuccess;
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "remote process exited"; }
const char* ncclGetLastError(ncclComm_t) { return "fake"; }

// cuda.h renames some of these by macros
#undef cuEventDestroy
CUresult cuEventCreate(CUevent* event, unsigned) { return *event = new CUevent_st{}, CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream) {
  return *event = {bound, peers_alive, aborts}, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = bound, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return bound = context, CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent event) {
  std::this_thread::sleep_for(std::chrono::milliseconds(query_milliseconds));
  if (event->context != bound) return CUDA_ERROR_INVALID_CONTEXT;
  if (device_fault) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return event->ends || event->abort_count < aborts ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventDestroy_v2(CUevent event) { return delete event, CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
}
