import os

import pytest
import torch

from fmoe_ext import info
from fmoe_ext.ops import cpu_isa, fast_bfloat16
from fmoe_ext.ops.processor import fast_float16

X86 = {"architecture": "x86_64", "cpu_name": "AMD EPYC"}
INTEL = {**X86, "cpu_name": "Intel Xeon", "avx512_bf16": True}


@pytest.mark.parametrize(
    ("capabilities", "aten", "expected"),
    [
        ({**X86, "avx512_bf16": True}, "AVX512", True),
        ({**X86, "avx512_bf16": True, "avx512_fp16": True}, "AVX512", True),
        ({**X86, "avx512_bf16": True}, "AVX2", False),
        ({**X86, "avx2": True}, "AVX2", False),
        (INTEL, "AVX512", True),
        ({**INTEL, "avx512_fp16": True}, "AVX512", False),
        ({**INTEL, "avx512_fp16": True, "amx_bf16": True}, "AVX512", True),
        ({"architecture": "aarch64", "bf16": True}, "DEFAULT", True),
        ({"architecture": "aarch64"}, "DEFAULT", False),
        ({}, "DEFAULT", False),
    ],
)
def test_fast_bfloat16_follows_the_processor(monkeypatch, capabilities, aten, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: aten)
    assert fast_bfloat16.__wrapped__() is expected


@pytest.mark.parametrize(
    ("capabilities", "aten", "expected"),
    [
        ({**X86, "avx512_bf16": True}, "AVX512", False),  # Zen 4
        ({**INTEL, "avx512_fp16": True}, "AVX512", True),
        ({**INTEL, "avx512_fp16": True}, "AVX2", False),
        ({"architecture": "aarch64", "bf16": True}, "DEFAULT", True),
    ],
)
def test_fast_float16_follows_the_processor(monkeypatch, capabilities, aten, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: aten)
    fast_bfloat16.cache_clear()
    assert fast_float16.__wrapped__() is expected
    fast_bfloat16.cache_clear()


@pytest.mark.skipif("FMOE_CPU_ISA" in os.environ, reason="FMOE_CPU_ISA names the instruction set")
def test_kernels_use_dot_products_of_bfloat16_only_where_they_are_fast():
    has = torch.cpu.get_capabilities()
    if not (has.get("avx512_bf16") and has.get("avx512_bw")):
        pytest.skip("this processor has no AVX512_BF16")
    has_tiles = has.get("amx_bf16") and not torch.ops.fmoe_ext._cpu_isa_refused()
    is_slow = has.get("avx512_fp16") and "Intel" in has.get("cpu_name", "")
    assert cpu_isa() == ("amx_bf16" if has_tiles else "avx512_vnni" if is_slow else "avx512_bf16")


def test_info_names_the_set_that_the_system_refuses(monkeypatch):
    monkeypatch.setattr(info, "refused_cpu_isa", lambda: "amx_bf16")
    assert f"{cpu_isa()} (amx_bf16 is refused by the system)" in info.report()
