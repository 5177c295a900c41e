#include "sanitize.h"

#include "scheduler.h"

#if defined(__SANITIZE_ADDRESS__)
// Stopped threads never unwind, and stacks are kept for the next launch.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
#endif

#if defined(EMU_TSAN)

namespace emu {
namespace {

void* emulator_fiber;  // stands for the emulator itself
void* caller_fiber;    // the OS thread that called run()
char launch_token, exit_token;

void become(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }

template <class Fn>
void as(Fiber* fiber, Fn fn) {
  become(machine.landing ? machine.landing_tsan_fiber : fiber ? fiber->tsan_fiber : emulator_fiber);
  fn();
  become(emulator_fiber);
}

}  // namespace

Inside::Inside() : fiber(self()) {
  if (!fiber->tsan_depth++) become(emulator_fiber);
}
Inside::~Inside() {
  if (!--fiber->tsan_depth) become(fiber->tsan_fiber);
}
void release(Fiber* fiber, char* token) {
  as(fiber, [&] { __tsan_release(token); });
}
void acquire(Fiber* fiber, char* token) {
  as(fiber, [&] { __tsan_acquire(token); });
}
void note_read(Fiber* fiber, const void* p, size_t n) {
  as(fiber, [&] { __tsan_read_range(const_cast<void*>(p), n); });
}
void note_write(Fiber* fiber, void* p, size_t n) {
  as(fiber, [&] { __tsan_write_range(p, n); });
}

TsanLaunch::TsanLaunch() {
  if (!emulator_fiber) emulator_fiber = __tsan_create_fiber(0);
  caller_fiber = __tsan_get_current_fiber();
  __tsan_release(&launch_token);
  become(emulator_fiber);
  __tsan_acquire(&launch_token);
}
TsanLaunch::~TsanLaunch() {
  machine.landing = false;
  __tsan_release(&exit_token);
  become(caller_fiber);
  __tsan_acquire(&exit_token);
}
void tsan_start_thread(Fiber* fiber) {
  become(fiber->tsan_fiber);
  __tsan_acquire(&launch_token);
}
void tsan_end_thread() {
  __tsan_release(&exit_token);
  become(emulator_fiber);
}
void tsan_new_fiber(Fiber* fiber) {
  if (!fiber->tsan_fiber) fiber->tsan_fiber = __tsan_create_fiber(0);
}
void tsan_retire_fiber(Fiber* fiber) {
  if (fiber->wait == Wait::done) return;  // recycled: creating one costs 0.4 ms
  release(fiber, &exit_token);
  __tsan_destroy_fiber(fiber->tsan_fiber);
  fiber->tsan_fiber = nullptr;
}
void tsan_new_cta(Cta* cta) {
  become(cta->tsan_fiber = __tsan_create_fiber(0));
  __tsan_acquire(&launch_token);
  become(emulator_fiber);
}
void tsan_retire_cta(Cta* cta) {
  become(cta->tsan_fiber);
  __tsan_release(&exit_token);
  become(emulator_fiber);
  __tsan_destroy_fiber(cta->tsan_fiber);
}

}  // namespace emu

#endif
