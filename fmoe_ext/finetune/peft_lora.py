"""Give PEFT's adapters of experts' weights to operators that take them beside the weight: lora.fuse().

PEFT computes experts (target_parameters) with W + scale B A: in each forward it adds to the weights of all experts a
product of their size; packed and streamed weights have no values to add to. lora.fuse() calls fuse_adapters(), which
makes its wrappers FusedParamWrapper: they hand A [E, r, in] and B [E, out, r] to the experts below instead, which
compute for the rows x of each expert

    x W^T + scale (x A^T) B^T

with r columns in between. The parameters, their names and PEFT's files stay. Where PEFT has no adapter active, or has
merged it, its own forward runs.
"""

import re
from typing import Any, cast

import peft
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from fmoe_ext import ops
from fmoe_ext.adapters import Lora, OnLattice, given
from fmoe_ext.frozen import frozen_mlp
from fmoe_ext.frozen.rounding import ROUNDED
from fmoe_ext.huggingface.ep import adapters_around, is_peft_model, save_adapters
from fmoe_ext.huggingface.saving import replace_save_pretrained
from fmoe_ext.linear import FMoELinear, NotesHooks

_OLDEST = (0, 19)  # before, A and B of a weight [E, out, in] had each other's sizes


class FusedParamWrapper(NotesHooks, ParamWrapper):
    """PEFT's wrapper of one weight of experts, which hands A and B to the experts instead of adding B @ A up."""

    on_lattice = False  # lora.fuse(quantize=): compute with the packed sum of weight and adapter

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        adapter = self.adapter
        if adapter is None or kwargs.get("adapter_names") is not None:
            return super().forward(x, *args, **kwargs)
        with given(self.get_base_layer(), self.parameter_name, adapter):
            return self.base_layer(x, *args, **kwargs)

    @property
    def adapter(self) -> Lora | None:
        """Return the sum of the active adapters; None where PEFT computes without any, or with merged weights."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not names:
            return None
        if self.on_lattice:
            if len(names) > 1:
                raise RuntimeError(
                    f"one adapter at a time is rounded with its weight, but {', '.join(names)} are active"
                )
            return OnLattice(*self._factors(names[0]), self.scaling[names[0]])
        dtype = self.get_param().dtype
        factors = [(*self._factors(name), self.scaling[name]) for name in names]
        if len(factors) == 1:
            a, b, scale = factors[0]
            return Lora(a.to(dtype), b.to(dtype), scale)
        # several adapters are one whose rank is the sum of theirs
        a = torch.cat([a for a, _, _ in factors], dim=1)
        b = torch.cat([b * scale for _, b, scale in factors], dim=2)
        return Lora(a.to(dtype), b.to(dtype), 1.0)

    def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [E, r, in] and B [E, out, r]; PEFT keeps the experts of B innermost."""
        # [E * r, in] and [out, r * E]
        a, b = cast(torch.Tensor, self.lora_A[name].weight), cast(torch.Tensor, self.lora_B[name].weight)
        num_experts = self.num_experts
        # a view of a matrix: torch copies its gradient four times as fast as with three permuted dimensions
        of_experts = b.reshape(-1, num_experts).t().view(num_experts, b.shape[0], -1)
        return a.reshape(num_experts, -1, a.shape[1]), of_experts

    mlp_with_adapters = staticmethod(frozen_mlp)  # FusedExperts calls it with the adapters of both weights

    @property
    def fused_adapter(self) -> Lora | None:
        """Return the adapter of an FMoELinear whose weight may be read without a call; else None."""
        base = self.base_layer
        may_be_read = isinstance(base, FMoELinear) and not base.must_be_called and not self.must_be_called
        return self.adapter if may_be_read else None

    @property
    def main_grad(self) -> ops.MainGrad | None:
        return None  # the weight is frozen: no backward adds to it


FusedParamWrapper.__name__ = ParamWrapper.__name__  # by which PEFT knows wrappers when it adds an adapter


def fuse_adapters(model: nn.Module, quantize: str | None = None) -> None:
    """Make every wrapper of an expert weight a FusedParamWrapper; see lora.fuse. All is checked before one changes."""
    if quantize is not None and quantize not in ROUNDED:
        raise ValueError(f'quantize must be one of {", ".join(ROUNDED)}, but got "{quantize}"')
    if tuple(int(part) for part in peft.__version__.split(".")[:2]) < _OLDEST:
        raise ImportError(
            f"lora.fuse needs PEFT 0.19 or newer, but this is {peft.__version__}: pip install -U peft"
        )
    wrappers = {n: m for n, m in model.named_modules() if isinstance(m, ParamWrapper) and _takes_adapters(m)}
    if not wrappers:
        raise ValueError(
            f"{type(model).__name__} has no adapter of PEFT on experts that fmoe_ext computes: use "
            "LoraConfig(target_parameters=[...]) with the names of the experts' weights, and for a model of "
            "Transformers fmoe_ext.huggingface.use(model)"
        )
    # of adapters that are trained
    for name, config in getattr(model, "peft_config", {}).items():
        for path, wrapper in wrappers.items():
            if name in wrapper.lora_A and wrapper.lora_A[name].weight.requires_grad:
                _refuse_ignored_options(
                    config, path.removeprefix("base_model.model.").removesuffix(".base_layer")
                )
    # quantize= needs weights that lie packed so in files
    if quantize is not None:
        for path, wrapper in wrappers.items():
            streamed = getattr(wrapper.get_base_layer(), "streamed", None)
            found = "of floats in memory" if streamed is None else streamed.format_of(wrapper.parameter_name)
            if found != quantize:
                raise ValueError(
                    f'quantize="{quantize}" trains on the values of experts that their files have in {quantize}, but '
                    f"those of {path} are {found}: give stream() a folder or GGUF file with {quantize} experts"
                )
    for wrapper in wrappers.values():
        # in place, so that PEFT's own references to the wrappers stay valid
        wrapper.__class__ = FusedParamWrapper
        cast(FusedParamWrapper, wrapper).on_lattice = quantize is not None
    if is_peft_model(model) and any(adapters_around(model)):
        replace_save_pretrained(model, save_adapters)


def _refuse_ignored_options(config: Any, path: str) -> None:
    """Raise ValueError for options that PEFT takes and leaves out for target_parameters. path: of the experts."""
    # PEFT applies these to target_modules alone, so that it would train something else than was asked for
    number = re.search(r"\.(\d+)\.", path)
    layers, excluded = config.layers_to_transform, config.exclude_modules or ()
    layers = [layers] if isinstance(layers, int) else layers
    is_excluded = (
        re.fullmatch(excluded, path)
        if isinstance(excluded, str)
        else any(f".{path}".endswith(f".{e}") for e in excluded)
    )
    ignored = {
        "layers_to_transform": layers is not None and number is not None and int(number[1]) not in layers,
        "exclude_modules": bool(is_excluded),
        'init_lora_weights="eva"': config.init_lora_weights == "eva",
        "use_qalora": getattr(config, "use_qalora", False),
    }
    for option in (option for option, is_ignored in ignored.items() if is_ignored):
        more = "; to adapt some layers, name them: target_parameters=['layers.1.mlp.experts.down_proj', ...]"
        raise ValueError(
            f"PEFT leaves {option} out for target_parameters, and adapts {path} without it: take it out of LoraConfig"
            + (more if option in ("layers_to_transform", "exclude_modules") else "")
        )


def _takes_adapters(wrapper: ParamWrapper) -> bool:
    """Return True for a weight of FMoELinear, or of experts that Transformers lets others compute."""
    base = wrapper.get_base_layer()
    if isinstance(base, FMoELinear):
        return bool(wrapper.parameter_name == "weight")
    return hasattr(base, "is_transposed") and wrapper.parameter_name in (
        "gate_up_proj",
        "up_proj",
        "down_proj",
    )
