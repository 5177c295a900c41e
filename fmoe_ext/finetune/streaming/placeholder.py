"""The parameters that stand for weights which stay in files, or packed in memory.

Transformers, PEFT, optimizers and trainers look at a model's parameters: their names, shapes, dtypes, whether they
need a gradient. A placeholder answers all of that, and is an error that says what to do where something would read
or change values, which would otherwise be NaN. It sees each call through __torch_function__: questions pass,
methods that would return the tensor itself do so, and all others are refused by name.
"""

from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from fmoe_ext.ep.wrappers import running_deepspeed

# questions about a tensor that need no values
_QUESTIONS = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
        "is_floating_point", "is_complex", "is_contiguous", "is_signed", "data_ptr", "untyped_storage",
        "get_device", "__hash__", "__len__", "has_names", "is_shared", "is_pinned",
        "_has_compatible_shallow_copy_type",
    }
)  # fmt: skip
# attributes that are other tensors of the same values
_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# methods that return the tensor itself if nothing changes
_SAME = frozenset(
    {
        "detach", "detach_", "contiguous", "requires_grad_", "to", "cpu", "type", "alias", "pin_memory",
        "float", "half", "double", "bfloat16", "__getitem__",
    }
)  # fmt: skip
_DEEPSPEED = "DeepSpeed"
# more to say about some calls that are refused
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
        # one NaN that all elements share: whatever slips through is seen
        nothing = torch.full((1,), float("nan"), dtype=dtype, device="cpu").expand(shape)
        return super().__new__(cls, nothing, requires_grad=False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__":
            if args[1] is args[0] or args[1] is None or (owner == "requires_grad" and not args[1]):
                return None
            cls._refuse(f"setting {owner}")
        if name == "__get__" and owner == "data":
            if running_deepspeed():
                cls._refuse(owner)
            return args[0]
        if (name == "__get__" and owner not in _VALUES) or name in _QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        if name in _SAME and _keeps(args[0], name, args[1:], kwargs):
            return args[0]
        cls._refuse(owner if name == "__get__" else name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamedWeight":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickling")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        what = _DEEPSPEED if running_deepspeed() else what
        raise RuntimeError(f"{what}: {_HINTS.get(what, '')}{cls.reason}")


class PackedWeight(StreamedWeight):
    """The same for the weight of a PackedLinear, which has its bytes."""

    reason = (
        "this weight is packed as its file has it, and is frozen. Call its layer, train adapters of PEFT on it "
        "without DoRA and without initial values that are computed from weights, and keep them unmerged"
    )


def _keeps(weight: torch.Tensor, name: str, args: Any, kwargs: Any) -> bool:
    """True if a method would return the same tensor."""
    if name == "requires_grad_":
        return not (*args, *kwargs.values(), True)[0]
    if name == "__getitem__":
        return args[0] is Ellipsis
    example = torch.empty(0, dtype=weight.dtype, device="cpu")
    return getattr(example, name)(*args, **kwargs).dtype == weight.dtype and all(
        torch.device(value).type == "cpu"
        for value in (*args, kwargs.get("device"))
        if isinstance(value, (str, torch.device))
    )
