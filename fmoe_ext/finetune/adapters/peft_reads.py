"""Check that the installed PEFT reads from a converted folder what the adapter is: why_not(), which convert() calls.

PEFT loads the folder into the model's architecture, whose weights are zeros that take no memory. Then PEFT's own change
of every layer (get_delta_weight), at some rows and columns, must be the adapter's. Modules that PEFT saves whole
(modules_to_save) are compared too, and no other weight may change. In a module of its own because it imports PEFT and
Transformers, which convert() can do without.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import peft
import torch
import transformers
from torch import Tensor, nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import BLOCKS
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.finetune.adapters.delta import module_of, plain_pairs
from fmoe_ext.finetune.adapters.reading import PARAMETERS, PREFIX, Adapter, Factors

_Layers: TypeAlias = Mapping[str, Mapping[str, Factors]]
# Of a change that are compared; unlike, so that one of 13 rows or more that is turned around shows
_ROWS, _COLUMNS = 16, 12


def why_not(adapter: Adapter, layers: _Layers, folder: Path, base: ModelFolder) -> str:
    """Say why PEFT reads something else from a folder than the adapter; "" if it reads the same.

    layers: of the adapter, gate and up joined.
    """
    # The model: its weights share one zero, so that every size fits.
    try:
        config = base.make_config()
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, (config.architectures or [""])[0])(config)
    except Exception as error:  # Transformers' errors have no common class
        raise CheckpointError(
            f"{base.folder} has a config.json of which Transformers makes no model: {error}"
        ) from error
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):  # weights that share one number
            setattr(module, name, nn.Parameter(zero.expand(parameter.shape), requires_grad=False))
    # The adapter, as PEFT loads it.
    try:
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            loaded = peft.PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    except Exception as error:  # PEFT's errors have no common class
        return f"PEFT {peft.__version__} does not load it: {' '.join(str(error).split())[:200]}"
    # Changes of weights.
    found = dict(_deltas(loaded))
    expected = dict(_expected(adapter, layers, found))
    for name in sorted(expected.keys() | found.keys()):
        theirs, ours = found.get(name), expected.get(name)
        if theirs is None:
            return f"PEFT {peft.__version__} leaves {name} out"
        if ours is None:
            if theirs.any():
                return f"PEFT {peft.__version__} changes {name} too"
        else:
            is_same = theirs.shape in (ours.shape, ours.mT.shape)
            ours = ours if theirs.shape == ours.shape else ours.mT  # of a model that stores [in, out]
            if not ours.isfinite().all():
                return f"the adapter's change of {name} is not finite"
            if not is_same or not (theirs - ours).norm() <= 1e-6 * ours.norm():  # of NaN neither is true
                return f"PEFT {peft.__version__} reads another change of {name}"
    # Modules that are saved whole.
    kept: dict[str, Tensor] = {}
    for path, module in loaded.named_modules():
        whole = getattr(module, "modules_to_save", None)
        if isinstance(whole, nn.ModuleDict) and "default" in whole:
            of_module = whole["default"].named_parameters()
            kept |= {f"{path.removeprefix(PREFIX)}.{leaf}": parameter for leaf, parameter in of_module}
    saved = {name: value for name, value in adapter.others.items() if ".lora_" not in name}
    for name, value in saved.items():
        leaf = name.removeprefix(PREFIX)
        if leaf not in kept or not torch.equal(kept[leaf], value.read().to(kept[leaf].dtype)):
            return f"PEFT {peft.__version__} leaves {leaf} out"
    return ""


def _deltas(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name of a weight, some rows and columns of PEFT's change) of each layer that has an adapter."""
    for path, module in model.named_modules():
        factors = getattr(module, "lora_A", None)
        if not isinstance(factors, nn.ModuleDict) or "default" not in factors:
            continue
        a: Any = factors["default"]
        b: Any = module.lora_B["default"]
        # cut the factors first: the change of all experts at once would be as large as their weights
        a.weight = nn.Parameter(_picked(a.weight, 1, _COLUMNS), requires_grad=False)
        b.weight = nn.Parameter(_picked(b.weight, 0, _ROWS), requires_grad=False)
        name = path.removeprefix(PREFIX).replace(".base_layer", "")
        delta: Any = module.get_delta_weight("default")
        yield f"{name}.{getattr(module, 'parameter_name', 'weight')}", delta


def _picked(t: Tensor, dim: int, most: int) -> Tensor:
    """Pick at most `most` rows along a dimension, evenly spread."""
    size = t.shape[dim]
    return t.index_select(dim, torch.arange(min(most, size), device=t.device) * size // min(most, size))


def _expected(adapter: Adapter, layers: _Layers, found: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield what _deltas() must find: the same rows and columns of the adapter's changes, in float64."""
    for layer, parts in layers.items():
        for role, factors in parts.items():
            a, b = (t.double() for t in factors.read())
            delta = _picked(b, 1, _ROWS) @ _picked(a, 2, _COLUMNS) * factors.scaling
            yield _known(f"{layer}.{PARAMETERS[role]}", found), delta
    for key, (first, second, scaling) in plain_pairs(adapter, whole_modules=True).items():
        a, b = first.read().double(), second.read().double()
        yield (
            _known(f"{module_of(key)}.weight", found),
            _picked(b, 0, _ROWS) @ _picked(a, 1, _COLUMNS) * scaling,
        )


def _known(name: str, found: Mapping[str, Tensor]) -> str:
    """Find the model's name of a weight; adapters' files may call its block otherwise."""
    names = [name, *(name.replace(f".{a}.", f".{b}.") for a in BLOCKS for b in BLOCKS)]
    return next((other for other in names if other in found), name)
