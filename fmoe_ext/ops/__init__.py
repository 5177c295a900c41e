"""The operators: one file each, with the public function, its fake kernel, its gradient and its oracle (`*_ref`).

Importing this package loads the native modules; it is the only place that does.
"""

import platform

import torch

try:
    import fmoe_ext._C  # noqa: F401  (registers the schemas and the CPU kernels)
except ImportError as error:
    raise ImportError(
        f"the native module fmoe_ext._C could not be loaded ({error}); rebuild it against the torch that is "
        "installed: pip install . --no-build-isolation (in a checkout: make build). "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    ) from error


def _load_cuda_module() -> str | None:
    """None if the CUDA kernels were loaded, otherwise one sentence that says why not."""
    if torch.version.cuda is None:
        return "the CUDA kernels need a CUDA build of torch, which this one is not: install one, then fmoe_ext again"
    try:
        import fmoe_ext._C_cuda  # noqa: F401
    except ImportError as error:
        return f"fmoe_ext was built without CUDA kernels (reinstall with FMOE_CUDA=1 and nvcc): {error}"
    return None


cuda_module_missing = _load_cuda_module()

from fmoe_ext.ops import gpu_kernels, gpu_proof  # noqa: E402
from fmoe_ext.ops.apply_capacity import apply_capacity, apply_capacity_ref  # noqa: E402
from fmoe_ext.ops.batch_invariant import (  # noqa: E402
    batch_invariant,
    is_batch_invariant,
    kernels_depend_on_batch,
    sigmoid,
    use_batch_invariant,
)
from fmoe_ext.ops.count_tokens import count_tokens, count_tokens_ref  # noqa: E402
from fmoe_ext.ops.expert_mlp import ACTIVATIONS, expert_mlp, expert_mlp_ref  # noqa: E402
from fmoe_ext.ops.grouped_gemm import grouped_gemm, grouped_gemm_ref  # noqa: E402
from fmoe_ext.ops.main_grad import MainGrad  # noqa: E402
from fmoe_ext.ops.permute import permute, permute_ref, unpermute, unpermute_ref  # noqa: E402
from fmoe_ext.ops.sort_tokens import SortedTokens, sort_tokens, sort_tokens_ref  # noqa: E402
from fmoe_ext.ops.topk_gate import topk_gate, topk_gate_again, topk_gate_ref  # noqa: E402

if cuda_module_missing is None:
    gpu_kernels.SELECTION.prepare()


def build_info() -> dict[str, str]:
    """Build settings of the native module: torch, compiler, CUDA architectures, NCCL."""
    return dict(fact.split("=", 1) for fact in torch.ops.fmoe_ext.build_info().split(","))


__all__ = [
    "ACTIVATIONS",
    "MainGrad",
    "SortedTokens",
    "apply_capacity",
    "apply_capacity_ref",
    "batch_invariant",
    "build_info",
    "count_tokens",
    "count_tokens_ref",
    "cuda_module_missing",
    "expert_mlp",
    "expert_mlp_ref",
    "gpu_kernels",
    "gpu_proof",
    "grouped_gemm",
    "grouped_gemm_ref",
    "is_batch_invariant",
    "kernels_depend_on_batch",
    "permute",
    "permute_ref",
    "sigmoid",
    "sort_tokens",
    "sort_tokens_ref",
    "topk_gate",
    "topk_gate_again",
    "topk_gate_ref",
    "unpermute",
    "unpermute_ref",
    "use_batch_invariant",
]
