"""Ask the processor: which instruction set the CPU kernels use, and whether torch multiplies 16 bits fast on it."""

import functools

import torch


def cpu_isa() -> str:
    """Return the instruction set of the CPU kernels: the processor's fastest, or the one that FMOE_CPU_ISA names."""
    return torch.ops.fmoe_ext._cpu_isa()


def refused_cpu_isa() -> str:
    """Return the instruction set that the processor has and the system refuses this process; empty if there is none."""
    return torch.ops.fmoe_ext._cpu_isa_refused()


@functools.cache
def fast_bfloat16() -> bool:
    """Return whether torch multiplies bfloat16 matrices at least as fast as float32 ones on this processor.

    It does with AMX, AVX512_BF16 of AMD, and bfdot of Arm. On Intel's processors since Sapphire Rapids AVX512_BF16
    without AMX, which virtual machines may hide, takes twice the time of float32. Without any such instruction
    bfloat16 takes 5 to 40 times as long.
    """
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64":
        return bool(has.get("bf16"))
    # less than the processor's if ATEN_CPU_CAPABILITY limits torch
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    is_made_for_amx = has.get("avx512_fp16") and "Intel" in has.get("cpu_name", "")
    return bool(has.get("amx_bf16") or (has.get("avx512_bf16") and not is_made_for_amx))


@functools.cache
def fast_float16() -> bool:
    """Return whether torch multiplies float16 matrices at least as fast as float32 ones on this processor.

    On x86 it does with AVX512_FP16, which AMD's Zen 4 and 5 and Intel's processors before Sapphire Rapids do not have:
    without it 64 rows take ten times as long. Elsewhere the answer is fast_bfloat16()'s.
    """
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64":
        return fast_bfloat16()
    return bool(has.get("avx512_fp16")) and "AVX512" in torch.backends.cpu.get_cpu_capability()
