// What AddressSanitizer and ThreadSanitizer must be told; nothing in a plain build.
//
// The emulator itself is compiled without -fsanitize=thread (with -DEMU_TSAN), the kernels with it. Each CUDA
// thread is a TSan fiber; the emulator and asynchronous work run as fibers of their own, and every
// happens-before edge of the CUDA model is given as a release and an acquire of a token.
#pragma once

#include <cstddef>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMU_TSAN)
extern "C" {
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void* __tsan_get_current_fiber();
void __tsan_acquire(void*);
void __tsan_release(void*);
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
}
#endif

namespace emu {

struct Fiber;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAsan = true;
inline void asan_poison(const void* p, size_t n) { __asan_poison_memory_region(p, n); }
inline void asan_unpoison(const void* p, size_t n) { __asan_unpoison_memory_region(p, n); }
#else
constexpr bool kAsan = false;
inline void asan_poison(const void*, size_t) {}
inline void asan_unpoison(const void*, size_t) {}
#endif

// Fills and copies that no sanitizer intercepts.
inline void raw_fill(void* p, int v, size_t n) {
  asm volatile("rep stosb" : "+D"(p), "+c"(n) : "a"(v) : "memory");
}
inline void raw_copy(void* d, const void* s, size_t n) {
  asm volatile("rep movsb" : "+D"(d), "+S"(s), "+c"(n) : : "memory");
}

#if defined(EMU_TSAN)
constexpr bool kTsan = true;
// While one lives, the CUDA thread that called into the emulator is the emulator as far as TSan knows.
struct Inside {
  Fiber* fiber;
  Inside();
  ~Inside();
};
// While one lives, memory is allocated and freed without a trace: it has no history.
struct Unobserved {
  Unobserved() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~Unobserved() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};
void release(Fiber* as, char* token);  // as nullptr: as the emulator, or as the asynchronous work that lands
void acquire(Fiber* as, char* token);
void note_read(Fiber* as, const void* p, size_t n);
void note_write(Fiber* as, void* p, size_t n);
inline void copy_bytes(void* d, const void* s, size_t n) { raw_copy(d, s, n); }
inline void zero_bytes(void* d, size_t n) { raw_fill(d, 0, n); }
#else
constexpr bool kTsan = false;
struct Inside {
  Inside() {}
};
struct Unobserved {
  Unobserved() {}
};
inline void release(Fiber*, char*) {}
inline void acquire(Fiber*, char*) {}
inline void note_read(Fiber*, const void*, size_t) {}
inline void note_write(Fiber*, void*, size_t) {}
inline void copy_bytes(void* d, const void* s, size_t n) { std::memcpy(d, s, n); }
inline void zero_bytes(void* d, size_t n) { std::memset(d, 0, n); }
#endif

}  // namespace emu
