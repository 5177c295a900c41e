// The part of NCCL's interface that csrc/nccl uses, for a library without a network (fake.cpp).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

struct ncclComm;
using ncclComm_t = ncclComm*;
struct ncclUniqueId {
  char internal[128];
};
enum ncclResult_t { ncclSuccess, ncclRemoteError = 6, ncclInProgress = 7 };
enum ncclDataType_t { ncclUint8 = 1 };
struct ncclConfig_t {
  int blocking;
  int maxCTAs;
};
#define NCCL_CONFIG_INITIALIZER {1, 0}

extern "C" {
ncclResult_t ncclGetUniqueId(ncclUniqueId*);
ncclResult_t ncclGetVersion(int*);
ncclResult_t ncclCommInitRankConfig(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t*);
ncclResult_t ncclCommAbort(ncclComm_t);
ncclResult_t ncclCommFinalize(ncclComm_t);
ncclResult_t ncclCommDestroy(ncclComm_t);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
const char* ncclGetErrorString(ncclResult_t);
const char* ncclGetLastError(ncclComm_t);
}
