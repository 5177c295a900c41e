"""fmoe_ext: Mixture-of-Experts training for PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from fmoe_ext import balance, distributed, gates, ops
from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.gates import BaseGate, BiasedSoftmaxGate, DCGate, ExpertChoiceGate, FasterGate, GShardGate, HashGate, NaiveGate, NoisyGate, QuantileGate, SigmoidGate, SinkhornGate, SoftmaxGate, SqrtSoftplusGate, SwipeGate, SwitchGate, UniformGate, ZeroGate
from fmoe_ext.balance import RoutingReplay
from fmoe_ext.models.fmoefy import fmoefy
from fmoe_ext.layers import FMoE
from fmoe_ext.linear import FMoELinear
from fmoe_ext.ops import batch_invariant, use_batch_invariant
from fmoe_ext.tokens import packed_sequences, token_ids, valid_tokens
from fmoe_ext.transformer import FMoETransformerMLP

if TYPE_CHECKING:
    from fmoe_ext import audit, checkpoint
    from fmoe_ext.formats import export, import_model
    from fmoe_ext.finetune.streaming import stream

__version__ = "0.1.0"
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
    "gates",
    "import_model",
    "ops",
    "packed_sequences",
    "stream",
    "token_ids",
    "use_batch_invariant",
    "valid_tokens",
]

# Modules that are imported when they are asked for: some bring torch.distributed.checkpoint or grpc.
_ROOMS = (
    *("audit", "checkpoint", "compat", "cpu", "gpu"),
    *("lora", "megatron", "optim", "pipeline", "remote", "testing"),
)


def __getattr__(name: str) -> Any:
    if name in ("export", "import_model"):
        return getattr(importlib.import_module("fmoe_ext.formats"), name)
    if name == "stream":
        return importlib.import_module("fmoe_ext.finetune.streaming").stream
    if name in _ROOMS:
        return importlib.import_module(f"fmoe_ext.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
