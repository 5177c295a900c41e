"""Stand for weights that stay in files, or packed in memory: parameters with a shape, a dtype and no values.

stream() gives a model a StreamedWeight for each weight of experts and a PackedWeight for each PackedLinear.
Transformers, PEFT and the Trainer ask a parameter for its shape, dtype and device, move it, freeze it and list it. All
that works (_QUESTIONS, and _SAME where nothing changes). Whatever would read or write values raises an error that says
what to do instead, rather than compute with the one NaN that the storage holds: every operation of torch comes through
__torch_function__.
"""

from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from fmoe_ext.ep.wrappers import running_deepspeed

# Questions about a tensor that need no values.
_QUESTIONS = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
        "is_floating_point", "is_complex", "is_contiguous", "is_signed", "data_ptr", "untyped_storage",
        "get_device", "__hash__", "__len__", "has_names", "is_shared", "is_pinned",
        "_has_compatible_shallow_copy_type",
    }
)  # fmt: skip
# Attributes that are other tensors of the same values.
_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Methods that return the tensor itself if nothing changes.
_SAME = frozenset(
    {
        "detach", "detach_", "contiguous", "requires_grad_", "to", "cpu", "type", "alias", "pin_memory",
        "float", "half", "double", "bfloat16", "__getitem__",
    }
)  # fmt: skip
_DEEPSPEED = "DeepSpeed"
# More to say for some of them.
_HINTS = MappingProxyType(
    {
        _DEEPSPEED: "it copies every weight: leave deepspeed= out of TrainingArguments, and train in one process. ",
        "_is_view": "torch.compile does not compile this model: leave torch_compile=True or torch.compile out. ",
        **dict.fromkeys(
            ("to", "float", "half", "double", "bfloat16", "type"),
            "Choose a dtype by stream(..., dtype=...), and leave bf16_full_eval and fp16_full_eval out. ",
        ),
    }
)


class StreamedWeight(nn.Parameter):
    """Stands for the weight of a layer's experts that lies in files: its shape and dtype, and no values.

    Whatever would read values raises RuntimeError, and so does a change of dtype or device. It requires no gradient.
    """

    reason = (
        "the weights of these experts stay in the files that fmoe_ext.stream() reads, and are frozen. Compute with "
        'experts_implementation "fmoe", train adapters of PEFT with fmoe_ext.lora.fuse(model), and merge them with '
        "`fmoe adapter merge`"
    )

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "StreamedWeight":
        # strides of 0: one number
        nothing = torch.full((1,), float("nan"), dtype=dtype, device="cpu").expand(shape)
        return super().__new__(cls, nothing, requires_grad=False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a method has its own name; reading or setting an attribute is __get__ or __set__ of a descriptor named so
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__":
            # what changes nothing: its own data, no gradient, frozen
            if args[1] is args[0] or args[1] is None or (owner == "requires_grad" and not args[1]):
                return None
            cls._refuse(f"setting {owner}")
        if name == "__get__" and owner == "data":
            if running_deepspeed():  # it would copy the data
                cls._refuse(owner)
            return args[0]
        if (name == "__get__" and owner not in _VALUES) or name in _QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        if name in _SAME and _keeps(args[0], name, args[1:], kwargs):
            return args[0]
        cls._refuse(owner if name == "__get__" else name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamedWeight":
        return self  # torch's would read values

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickling")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        what = _DEEPSPEED if running_deepspeed() else what
        raise RuntimeError(f"{what}: {_HINTS.get(what, '')}{cls.reason}")


class PackedWeight(StreamedWeight):
    """Stands for the weight of a PackedLinear, which has its bytes packed; otherwise as StreamedWeight."""

    reason = (
        "this weight is packed as its file has it, and is frozen. Call its layer, train adapters of PEFT on it "
        "without DoRA and without initial values that are computed from weights, and keep them unmerged"
    )


def _keeps(weight: torch.Tensor, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a method would return the same tensor: the same dtype, on the CPU."""
    if name == "requires_grad_":
        return not (*args, *kwargs.values(), True)[0]
    if name == "__getitem__":
        return args[0] is Ellipsis
    # by what it does to an empty tensor: a device may be a name, a number or another tensor's
    moved = getattr(torch.empty(0, dtype=weight.dtype, device="cpu"), name)(*args, **kwargs)
    return moved.dtype == weight.dtype and moved.device.type == "cpu"
