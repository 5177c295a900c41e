// Events of the CUDA driver, by which the watchdog of communicator.cpp sees that an exchange has ended. The
// driver is loaded at run time: this module links no CUDA library.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace fmoe_ext {

class Driver {
 public:
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }
  decltype(&cuEventCreate) event_create;
  decltype(&cuEventRecord) event_record;
  decltype(&cuEventQuery) event_query;
  decltype(&cuEventDestroy) event_destroy;
  decltype(&cuStreamIsCapturing) stream_is_capturing;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuCtxSetCurrent) set_current_context;

 private:
  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) throw std::runtime_error("libcuda.so.1, the CUDA driver, was not found");
    find(event_create, library, "cuEventCreate");
    find(event_record, library, "cuEventRecord");
    find(event_query, library, "cuEventQuery");
    find(event_destroy, library, "cuEventDestroy_v2");
    find(stream_is_capturing, library, "cuStreamIsCapturing");
    find(exchange_capture_mode, library, "cuThreadExchangeStreamCaptureMode");
    find(current_context, library, "cuCtxGetCurrent");
    find(set_current_context, library, "cuCtxSetCurrent");
  }
  template <class Function>
  static void find(Function& function, void* library, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  }
};

inline bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return Driver::get().stream_is_capturing(stream, &status) == CUDA_SUCCESS &&
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// A mark behind all that has been put on a stream so far; is_done() says whether the stream has reached it.
class RecordedEvent {
 public:
  explicit RecordedEvent(CUstream stream) {
    CUevent event = nullptr;
    check(Driver::get().current_context(&context_), "cuCtxGetCurrent");
    check(Driver::get().event_create(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    event_.reset(event, [](CUevent e) { Driver::get().event_destroy(e); });
    check(Driver::get().event_record(event, stream), "cuEventRecord");
  }
  // By any thread, also while another one captures a graph. Throws if the stream's work failed. Sets the
  // calling thread's context and leaves it in relaxed capture mode for good: call it on a thread of our own
  // (the watchdog's).
  bool is_done() const {
    const Driver& driver = Driver::get();
    CUcontext bound = nullptr;
    if (driver.current_context(&bound) != CUDA_SUCCESS || bound != context_)
      check(driver.set_current_context(context_), "cuCtxSetCurrent");
    // once for each thread; a failure shows in the query
    thread_local const bool relaxed = [&] {
      CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
      return driver.exchange_capture_mode(&mode) == CUDA_SUCCESS;
    }();
    (void)relaxed;
    const CUresult found = driver.event_query(event_.get());
    if (found != CUDA_ERROR_NOT_READY) check(found, "cuEventQuery");
    return found == CUDA_SUCCESS;
  }

 private:
  static void check(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS)
      throw std::runtime_error(std::string(call) + " failed with CUresult " + std::to_string(result));
  }
  CUcontext context_ = nullptr;  // of the device that it was recorded on
  std::shared_ptr<CUevent_st> event_;
};

}  // namespace fmoe_ext
