"""fmoe_ext: Mixture-of-Experts training for PyTorch.

Layers, gates and operators are imported with the package. Its other modules, and a few names of them, are imported at
their first use (__getattr__), so that `import fmoe_ext` stays fast and needs torch alone.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fmoe_ext import gates, ops
from fmoe_ext.gates import (
    BaseGate,
    BiasedSoftmaxGate,
    DCGate,
    ExpertChoiceGate,
    FasterGate,
    GShardGate,
    HashGate,
    NaiveGate,
    NoisyGate,
    QuantileGate,
    SigmoidGate,
    SinkhornGate,
    SoftmaxGate,
    SqrtSoftplusGate,
    SwipeGate,
    SwitchGate,
    UniformGate,
    ZeroGate,
)
from fmoe_ext.layers import FMoE, ParallelLayout
from fmoe_ext.linear import FMoELinear
from fmoe_ext.ops import batch_invariant, use_batch_invariant
from fmoe_ext.tokens import packed_sequences, token_ids, valid_tokens
from fmoe_ext.transformer import FMoETransformerMLP

if TYPE_CHECKING:  # what __getattr__ imports; "as" makes a name outside __all__ public to a type checker
    from fmoe_ext import audit, balance, checkpoint, distributed, frozen
    from fmoe_ext import compat as compat
    from fmoe_ext import compress as compress
    from fmoe_ext import cpu as cpu
    from fmoe_ext import doctor as doctor
    from fmoe_ext import finetune as finetune
    from fmoe_ext import formats as formats
    from fmoe_ext import gpu as gpu
    from fmoe_ext import huggingface as huggingface
    from fmoe_ext import lora as lora
    from fmoe_ext import megatron as megatron
    from fmoe_ext import optim as optim
    from fmoe_ext import pipeline as pipeline
    from fmoe_ext import planning as planning
    from fmoe_ext import remote as remote
    from fmoe_ext import testing as testing
    from fmoe_ext.balance import RoutingReplay
    from fmoe_ext.distributed import DistributedGroupedDataParallel
    from fmoe_ext.finetune.streaming import stream
    from fmoe_ext.formats import export, import_model
    from fmoe_ext.models.fmoefy import fmoefy

__version__ = "0.2.0"
__all__ = [
    "BaseGate",
    "BiasedSoftmaxGate",
    "DCGate",
    "DistributedGroupedDataParallel",
    "ExpertChoiceGate",
    "FMoE",
    "FMoELinear",
    "FMoETransformerMLP",
    "FasterGate",
    "GShardGate",
    "HashGate",
    "NaiveGate",
    "NoisyGate",
    "ParallelLayout",
    "QuantileGate",
    "RoutingReplay",
    "SigmoidGate",
    "SinkhornGate",
    "SoftmaxGate",
    "SqrtSoftplusGate",
    "SwipeGate",
    "SwitchGate",
    "UniformGate",
    "ZeroGate",
    "audit",
    "balance",
    "batch_invariant",
    "checkpoint",
    "distributed",
    "export",
    "fmoefy",
    "frozen",
    "gates",
    "import_model",
    "ops",
    "packed_sequences",
    "stream",
    "token_ids",
    "use_batch_invariant",
    "valid_tokens",
]

# Imported at their first use: some import torch.distributed.checkpoint, which is slow, or grpc, which is optional.
_MODULES_ON_DEMAND = (
    "audit", "balance", "checkpoint", "compat", "compress", "cpu", "distributed", "doctor", "finetune", "formats",
    "frozen", "gpu", "huggingface", "lora", "megatron", "optim", "pipeline", "planning", "remote", "testing",
)  # fmt: skip
_NAMES_ON_DEMAND = MappingProxyType(
    {
        "DistributedGroupedDataParallel": "fmoe_ext.distributed",
        "RoutingReplay": "fmoe_ext.balance",
        "export": "fmoe_ext.formats",
        "fmoefy": "fmoe_ext.models.fmoefy",
        "import_model": "fmoe_ext.formats",
        "stream": "fmoe_ext.finetune.streaming",
    }
)


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every misspelt name, as Any

    def __getattr__(name: str) -> Any:
        if name in _NAMES_ON_DEMAND:
            return getattr(importlib.import_module(_NAMES_ON_DEMAND[name]), name)
        if name in _MODULES_ON_DEMAND:
            return importlib.import_module(f"fmoe_ext.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES_ON_DEMAND, "__version__"})
