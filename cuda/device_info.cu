// What products.h asks of the current device, to choose a kernel (select.h) and its grid; contracts in
// launchers.h.
#include "common.cuh"

namespace fmoe_ext {

DeviceInfo current_device_info() {
#ifdef __CUDACC__
  int device = 0, major = 0, minor = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(&major, cudaDevAttrComputeCapabilityMajor);
  get(&minor, cudaDevAttrComputeCapabilityMinor);
  get(&num_sms, cudaDevAttrMultiProcessorCount);
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("fmoe_ext: asking for the CUDA device failed: ") +
                             cudaGetErrorString(error));
  return {10 * major + minor, num_sms};
#else
  return {emu::config.capability, emu::config.num_sms};
#endif
}

bool is_capturing(LaunchStream stream) {
#ifdef __CUDACC__
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
#else
  return emu::config.is_capturing;
#endif
}

}  // namespace fmoe_ext
