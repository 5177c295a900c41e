"""FastMoE's module tree on top of fmoe_ext: `import fmoe_ext.compat as fmoe`, or install() and `import fmoe`.

FastMoE's part is a thin translation: names, arguments, their order, initial values and dtypes are FastMoE's, the maths
is the core's, so that a program and its checkpoints go on as they are. Private names that published programs import
(_Expert, _fmoe_general_global_forward) are kept; docs/fastmoe.md lists the intended differences.

    functions.py, _ranks.py                  the autograd functions, and their exchanges with other ranks
    layers.py, _gates.py, _fastermoe.py      what FastMoE has in many small files; _TREE makes its modules of them
    megatron/                                Megatron-LM v2.2 to v3.0.2
    fairscale/, torch_pipe.py                no FastMoE: the Pipe of FairScale and torchgpipe, and torch's
"""

import importlib
import sys
from types import MappingProxyType, ModuleType

from fmoe_ext.compat import functions, megatron
from fmoe_ext.compat.layers import (
    DistributedGroupedDataParallel,
    FMoE,
    FMoELinear,
    FMoETransformerMLP,
)

# {module of FastMoE: (file here, its names in it)}; those above others come first
_TREE = MappingProxyType(
    {
        "balance": ("megatron.balance", "metrics reset_balance_profile update_balance_profile"),
        "megatron.utils": ("megatron.runtime", "add_fmoe_args"),
        "distributed": ("layers", "DistributedGroupedDataParallel"),
        "linear": ("layers", "FMoELinear MOELinear draw_as_fastmoe"),
        "transformer": ("layers", "FMoETransformerMLP _Expert"),
        "utils": ("layers", "get_torch_default_comm get_rank_0_in_comm"),
        "gates": ("_gates", "ZeroGate NaiveGate NoisyGate GShardGate SwitchGate DCGate SwipeGate"),
        "gates.base_gate": ("_gates", "BaseGate"),
        "gates.dc_gate": ("_gates", "DCGate"),
        "gates.faster_gate": ("_gates", "FasterGate gen_faster_gate nw_per_node"),
        "gates.gshard_gate": ("_gates", "GShardGate"),
        "gates.naive_gate": ("_gates", "NaiveGate"),
        "gates.noisy_gate": ("_gates", "NoisyGate"),
        "gates.swipe_gate": ("_gates", "SwipeGate"),
        "gates.switch_gate": ("_gates", "SwitchGate"),
        "gates.utils": ("_gates", "limit_by_capacity"),
        "gates.zero_gate": ("_gates", "ZeroGate"),
        "fastermoe": ("_fastermoe", ""),
        "fastermoe.config": ("_fastermoe", "float_from_env switch_from_env"),
        "fastermoe.expert_utils": (
            "_fastermoe",
            "get_expert_param_size get_expert_params stash_expert_params pop_expert_params collect_expert_grads "
            "set_grads",
        ),
        "fastermoe.schedule": ("_fastermoe", "MoEForward policy_fn _fmoe_general_global_forward"),
        "fastermoe.shadow_policy": ("_fastermoe", "global_policy no_shadow_policy get_shadow_policy"),
    }
)


def install() -> None:
    """Make `import fmoe` and every submodule of it mean this package, for programs written for FastMoE.

    Raises RuntimeError if another fmoe was imported before. Calling it again does nothing.
    """
    present = sys.modules.get("fmoe")
    if present is not None and present is not sys.modules[__name__]:
        raise RuntimeError(
            f"another fmoe is already imported, from {getattr(present, '__file__', None)}: call "
            "fmoe_ext.compat.install() before the first `import fmoe`, or uninstall FastMoE"
        )
    # the same module objects, so that a class imported by either name is one class
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{__name__}."):
            sys.modules[f"fmoe{name.removeprefix(__name__)}"] = module


def _make_modules() -> None:
    """Make the modules of _TREE, each an attribute of the module above it."""
    for path, (source, names) in _TREE.items():
        module = ModuleType(f"{__name__}.{path}", f"fmoe.{path}.")
        module.__path__ = []  # makes it a package, whose modules `import` finds in sys.modules
        home = importlib.import_module(f"{__name__}.{source}")
        vars(module).update({name: getattr(home, name) for name in names.split()})
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)


_make_modules()

__all__ = [
    "DistributedGroupedDataParallel",
    "FMoE",
    "FMoELinear",
    "FMoETransformerMLP",
    "functions",
    "install",
    "megatron",
]
