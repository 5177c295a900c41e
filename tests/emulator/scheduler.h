// Hooks by which the scheduler tells ThreadSanitizer of launches, threads and blocks.
#pragma once

#include "state.h"

namespace emu {

#if defined(EMU_TSAN)
struct TsanLaunch {
  TsanLaunch();
  ~TsanLaunch();
};
void tsan_start_thread(Fiber*);
void tsan_end_thread();
void tsan_new_fiber(Fiber*);
void tsan_retire_fiber(Fiber*);
void tsan_new_cta(Cta*);
void tsan_retire_cta(Cta*);
#else
struct TsanLaunch {
  TsanLaunch() {}
};
inline void tsan_start_thread(Fiber*) {}
inline void tsan_end_thread() {}
inline void tsan_new_fiber(Fiber*) {}
inline void tsan_retire_fiber(Fiber*) {}
inline void tsan_new_cta(Cta*) {}
inline void tsan_retire_cta(Cta*) {}
#endif

}  // namespace emu
