"""The operators, a file each: public function, fake kernel (shapes alone), oracle (`*_ref`) and gradient, if any.

Importing this package loads the native modules _C and _C_cuda; no other place does (ep/exchange.py loads _C_nccl).
"""

import importlib
import platform
import sys
from pathlib import Path

import torch

from fmoe_ext import _env


def _why_not_loaded(error: ImportError) -> str:
    """Say why a native module is missing or cannot be loaded, and what to do."""
    package = Path(__file__).resolve().parent.parent
    if any(package.glob("_C.*")):
        return (
            f"the native module in {package} could not be loaded ({error}): build fmoe_ext again for the torch that "
            "is installed, by `pip install -e . --no-build-isolation` in its checkout"
        )
    build = f"run `pip install -e . --no-build-isolation` in {package.parent}"
    folders = (Path(entry or ".").resolve() / "fmoe_ext" for entry in sys.path)
    installed = next((folder for folder in folders if folder != package and any(folder.glob("_C.*"))), None)
    if installed is None:
        return f"{package} is a checkout without its native module fmoe_ext._C: {build}"
    return (
        f"{package} is a checkout without its native module, and Python found it before the fmoe_ext that is "
        f"installed in {installed}: start Python in another folder than {package.parent}, or build the checkout too: "
        + build
    )


# 1. The CPU module: the schemas of all operators, and their CPU kernels.
try:
    import fmoe_ext._C  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"{_why_not_loaded(error)}. "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    ) from error


# 2. The instruction set, if the environment names one.
if (_isa := _env.get("FMOE_CPU_ISA")) is not None and not torch.ops.fmoe_ext._set_cpu_isa(_isa):
    _refused_isa = torch.ops.fmoe_ext._cpu_isa_refused() == _isa
    _why = "the system refuses to this process" if _refused_isa else "this processor does not have"
    raise ImportError(f"FMOE_CPU_ISA is {_isa!r}, which {_why}: set a lesser one or leave it unset")


def _load_cuda_module() -> str | None:
    """Load the CUDA kernels -> None, or one sentence that says why they are not there."""
    if torch.version.hip is not None:
        return "fmoe_ext has no kernels for AMD's GPUs: move tensors to the CPU, or use another library on this GPU"
    if torch.version.cuda is None:
        return "the CUDA kernels need a CUDA build of torch, which this one is not: install one, then fmoe_ext again"
    try:
        import fmoe_ext._C_cuda  # noqa: F401
    except ImportError as error:
        return f"fmoe_ext was built without CUDA kernels (reinstall with FMOE_CUDA=1 and nvcc): {error}"
    return None


def _refuse_tensors(dispatch_key: str, reason: str) -> torch.library.Library:
    """Make the operators of cuda/ raise the reason for tensors of a device, as long as the result lives.

    Backward operators are left out: they are not reached without their forward.
    """

    def refuse(*_: object) -> None:
        raise RuntimeError(reason)

    library = torch.library.Library("fmoe_ext", "IMPL")
    for name in (
        "grouped_gemm",
        "expert_mlp",
        "_decode_packed",
        "permute",
        "unpermute",
        "sort_tokens",
        "count_tokens",
        "apply_capacity",
        "topk_gate",
    ):
        library.impl(name, refuse, dispatch_key)
    return library


# 3. The CUDA module, or errors that say why there is none; None here says that it is loaded.
cuda_module_missing = _load_cuda_module()
if cuda_module_missing is not None and (torch.version.cuda or torch.version.hip):
    _refused = _refuse_tensors("CUDA", cuda_module_missing)

# 4. The public functions, whose files look up operators when they are imported.
from fmoe_ext.ops import in_order  # noqa: E402, F401  (torch's functions in batch_invariant())
from fmoe_ext.ops.activations import ACTIVATIONS  # noqa: E402
from fmoe_ext.ops.apply_capacity import (  # noqa: E402
    apply_capacity,
    apply_capacity_ref,
    drop_choices,
    drop_choices_ref,
)
from fmoe_ext.ops.balance_loss import balance_loss, balance_loss_ref  # noqa: E402
from fmoe_ext.ops.batch_invariant import (  # noqa: E402
    batch_invariant,
    is_batch_invariant,
    kernels_depend_on_batch,
    sigmoid,
    use_batch_invariant,
)
from fmoe_ext.ops.clamped_glu import clamped_glu, clamped_glu_ref  # noqa: E402
from fmoe_ext.ops.expert_mlp import expert_mlp, expert_mlp_ref  # noqa: E402
from fmoe_ext.ops.grouped_gemm import grouped_gemm, grouped_gemm_ref  # noqa: E402
from fmoe_ext.ops.main_grad import MainGrad  # noqa: E402
from fmoe_ext.ops.newton_schulz import newton_schulz, newton_schulz_ref  # noqa: E402
from fmoe_ext.ops.permute import permute, permute_ref, unpermute, unpermute_ref  # noqa: E402
from fmoe_ext.ops.processor import cpu_isa, fast_bfloat16  # noqa: E402
from fmoe_ext.ops.sort_tokens import (  # noqa: E402
    SortedTokens,
    count_tokens,
    count_tokens_ref,
    sort_tokens,
    sort_tokens_ref,
)
from fmoe_ext.ops.topk_gate import topk_gate, topk_gate_again, topk_gate_ref  # noqa: E402

# 5. The choice of CUDA kernels; by name, because ops is below the room gpu.
if cuda_module_missing is None:
    importlib.import_module("fmoe_ext.gpu.kernels").SELECTION.prepare()


def build_info() -> dict[str, str]:
    """Return the build settings of the native module: torch, compiler, CUDA architectures, NCCL."""
    return dict(fact.split("=", 1) for fact in torch.ops.fmoe_ext.build_info().split(","))


def release_memory() -> None:
    """Return memory to the system that the CPU operators have kept when gradients and workspaces were freed.

    They keep blocks of 4 MiB and more for the next step. The system can take the pages when it needs memory; until then
    they count as resident. Call it before a program measures its memory.
    """
    torch.ops.fmoe_ext._release_memory()


__all__ = [
    "ACTIVATIONS",
    "MainGrad",
    "SortedTokens",
    "apply_capacity",
    "apply_capacity_ref",
    "balance_loss",
    "balance_loss_ref",
    "batch_invariant",
    "build_info",
    "clamped_glu",
    "clamped_glu_ref",
    "count_tokens",
    "count_tokens_ref",
    "cpu_isa",
    "cuda_module_missing",
    "drop_choices",
    "drop_choices_ref",
    "expert_mlp",
    "expert_mlp_ref",
    "fast_bfloat16",
    "grouped_gemm",
    "grouped_gemm_ref",
    "is_batch_invariant",
    "kernels_depend_on_batch",
    "newton_schulz",
    "newton_schulz_ref",
    "permute",
    "permute_ref",
    "release_memory",
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
