// Closes what isa_begin.h opened.

}  // namespace
}  // namespace fmoe_ext::gemm

#if defined(FMOE_TARGET) && defined(__clang__)
#pragma clang attribute pop
#elif defined(FMOE_TARGET)
#pragma GCC pop_options
#endif
