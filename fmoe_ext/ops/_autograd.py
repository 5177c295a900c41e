"""Register gradients, fake kernels and autocast rules of operators, where torch.library's own ways do not suffice.

An operator's gradient is two functions, setup(ctx, inputs, output) and backward(ctx, *grads). register_autograd() puts
them into two places, and as_node() into a third:

* the dispatcher (torch.library.register_autograd), for compiled graphs and for those who call the operator itself;
* an autograd.Function (call_functional), because torch.func cannot transform the dispatcher's;
* an autograd.Function of the older kind (as_node, and by hand in _split.py), which public functions take where neither
  is needed: it is half of the host time of the dispatcher's.

Forward mode is refused everywhere: without a rule, torch takes an operator's result for a constant, and a tangent
silently becomes zero. Operators that compute a backward have no gradient in the dispatcher, which would cost each call
time: their kernels refuse gradient mode (csrc/checks.h), and call() differentiates them where a second derivative is
asked for (register_second_derivative).
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.library import Library

from fmoe_ext.ops.batch_invariant import with_mode_of_forward


def refuse_tangents(name: str, *tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError if one has a forward-mode tangent, which the operator would silently drop."""
    for t in tensors:
        if t is not None and t.is_floating_point() and unpack_dual(t).tangent is not None:
            raise no_forward_mode(name)


def no_forward_mode(name: str) -> NotImplementedError:
    """Make the error for an operator without a forward-mode derivative."""
    return NotImplementedError(
        f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad): "
        "use reverse mode (torch.func.vjp, jacrev, backward)"
    )


class _Below(threading.local):
    runs = False  # True while this thread is in a node of our own, whose jvp() refuses tangents


_below: Final = _Below()


class _ReverseModeOnly(Library):
    """A library that puts a check for forward-mode tangents in front of every kernel that is registered with it.

    torch.library.register_autograd(lib=...) registers its autograd kernel by impl(), which is the place to wrap it.
    """

    def __init__(self, places: Sequence[int] | None) -> None:
        super().__init__("fmoe_ext", "IMPL")
        self._places = places

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any) -> None:
        places = self._places

        def checked(keyset: Any, *args: Any) -> Any:
            if not _below.runs:
                for t in tensors_of(args):
                    if unpack_dual(t).tangent is not None:
                        refuse_tangents(op_name, t)
            try:
                return fn(keyset, *args)
            except RuntimeError as error:
                # torch.func cannot transform what torch.library registers; torch's error does not say what to do
                if isinstance(error, NotImplementedError) or not _are_wrapped(*tensors_of(args)):
                    raise
                way_out = (
                    "inside torch.compile: transform the compiled function, as in torch.func.grad(torch.compile(f)), "
                    "or take the gradient by torch.autograd.grad() in it"
                    if (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
                    else "itself: call the function of fmoe_ext.ops or fmoe_ext.frozen in its place"
                )
                raise RuntimeError(
                    f"torch.func (grad, vjp, jacrev) cannot transform torch.ops.fmoe_ext.{op_name} {way_out}"
                ) from error

        def tensors_of(args: Sequence[Any]) -> list[torch.Tensor]:
            # the dispatcher leaves out arguments at the end that have their default
            given = args if places is None else [args[place] for place in places if place < len(args)]
            entries = [t for entry in given for t in (entry if isinstance(entry, list) else (entry,))]
            return [t for t in entries if isinstance(t, torch.Tensor)]

        super().impl(op_name, checked, dispatch_key, **options)


_libraries: Final[list[Library]] = []  # registrations live as long as these do
_functional: Final[dict[str, type[torch.autograd.Function]]] = {}  # by the name of the operator


def is_transformed(*tensors: torch.Tensor | None) -> bool:
    """Return whether a transform of torch.func (grad, vjp, jacrev) has wrapped one of these."""
    return not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()) and _are_wrapped(
        *tensors
    )


def _are_wrapped(*tensors: torch.Tensor | None) -> bool:
    # torch has no public way to ask; a wrapper of torch.func has no memory, so asking for its address raises
    try:
        for t in tensors:
            if type(t) is torch.Tensor:  # as wrappers are, but neither parameters nor fake tensors
                t.data_ptr()
    except RuntimeError:
        return True
    return False


def call_functional(op_name: str, *args: Any) -> Any:
    """Call the operator with its gradient as an autograd.Function, which torch.func can transform."""
    return _functional[op_name].apply(*args)


def call(op_name: str, *args: Any) -> Any:
    """Call an operator that can be differentiated again, inside torch.func's transforms too: in a backward, mostly.

    args: all arguments of the operator; in a backward the first is the gradient.
    """
    # 1. With a gradient of its own, or in a transform: by the autograd.Function.
    if torch.is_grad_enabled() and not (
        torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    ):
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        if any(t.requires_grad for t in tensors) or is_transformed(*tensors):
            return call_functional(op_name, *args)
    name = op_name.removeprefix("fmoe_ext::")
    # 2. Else the operator itself. Only the gradient may have a tangent: the forward has refused those of the others.
    if unpack_dual(args[0]).tangent is not None:
        refuse_tangents(name, args[0])
    op = getattr(torch.ops.fmoe_ext, name)
    if (
        torch.is_grad_enabled()
        and "_backward" in name
        and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
    ):
        # with create_graph, but nothing here needs a gradient: the kernel would refuse gradient mode
        with torch.no_grad():
            return op(*args)
    return op(*args)


def below(op: Callable[..., Any], *args: Any) -> Any:
    """Call op(*args) in a node of our own, whose jvp() refuses tangents: looking for them twice takes host time."""
    _below.runs = True
    try:
        return op(*args)
    finally:
        _below.runs = False


def as_node(
    op_name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> type[torch.autograd.Function]:
    """Make an autograd.Function of the operator and its gradient, in half of the host time of the dispatcher's."""
    name = op_name.removeprefix("fmoe_ext::")
    op = getattr(torch.ops.fmoe_ext, name)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = below(op, *inputs)
        setup_context(ctx, inputs, output)
        return output

    def jvp(ctx: Any, *_: Any) -> None:
        raise no_forward_mode(name)

    methods = {"forward": forward, "backward": backward, "jvp": jvp}
    body = {method: staticmethod(function) for method, function in methods.items()}
    return type(f"Node_{name}", (torch.autograd.Function,), body)


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all inputs for the backward: the setup of an operator that takes tensors alone."""
    ctx.save_for_backward(*inputs)


def _make_functional(
    op_name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> type[torch.autograd.Function]:
    name = op_name.removeprefix("fmoe_ext::")

    # with setup_context apart from forward, as torch.func needs it
    def forward(*args: Any) -> Any:
        return getattr(torch.ops.fmoe_ext, name)(*args)

    def jvp(ctx: Any, *_: Any) -> None:
        raise no_forward_mode(name)

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    methods = {"forward": forward, "backward": backward, "jvp": jvp}
    methods["setup_context"] = setup_context or keep_nothing
    body = {method: staticmethod(function) for method, function in methods.items()}
    return type(f"Functional_{name}", (torch.autograd.Function,), {**body, "generate_vmap_rule": True})


def register_autograd(
    op_name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    *,
    places: Sequence[int] | None = None,
) -> None:
    """Register a gradient as torch.library.register_autograd does; but forward mode raises, instead of giving zeros.

    places: positions of the arguments that may have a tangent, floating ones; None: look at all tensors.
    """
    setup_context, backward = with_mode_of_forward(setup_context, backward)
    _functional[op_name] = _make_functional(op_name, backward, setup_context)
    _libraries.append(_ReverseModeOnly(places))
    torch.library.register_autograd(op_name, backward, setup_context=setup_context, lib=_libraries[-1])


Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def custom_op(op_name: str) -> Callable[[Callable[..., Any]], Any]:
    """Define an operator as torch.library.custom_op does, for which register_autograd() can refuse forward mode.

    torch's own has an autograd kernel that silently drops tangents and cannot be replaced.
    """

    def define(kernel: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(kernel, mutates_args=())
        torch.library.define(op_name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(op_name, "default", kernel)
        return getattr(torch.ops.fmoe_ext, op_name.removeprefix("fmoe_ext::"))

    return define


def register_fake(
    op_name: str, arguments: type[Any] | None = None, /, **ranks: int
) -> Callable[[Kernel], Kernel]:
    """Register a fake kernel as torch.library.register_fake does, behind checks of its tensors.

    arguments: the kernel takes one argument, this NamedTuple; None: it takes the operator's.
    ranks: the number of dimensions that each argument must have, by name; the kernel may then read their sizes.
    All tensors must be on one device: the dispatcher calls the fake kernel also where one of several tensors is on
    "meta", and the result would be memory that nothing was written to.
    """

    def register(kernel: Kernel) -> Kernel:
        names = list(inspect.signature(kernel).parameters) if arguments is None else arguments._fields

        # torch passes arguments by place or by name; the checks need the names
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
            first = next(iter(tensors))
            for name, t in tensors.items():
                if t.device != tensors[first].device:
                    raise RuntimeError(
                        f"{name} must be on {tensors[first].device} like {first}, but it is on {t.device}"
                    )
                if t.dim() != ranks.get(name, t.dim()):
                    raise RuntimeError(
                        f"{name} must have {ranks[name]} dimensions, but got shape {list(t.shape)}"
                    )
            return kernel(**given) if arguments is None else kernel(arguments(**given))

        torch.library.register_fake(op_name, checked)
        return kernel

    return register


def register_autocast(library: torch.library.Library, op: Any, cast: tuple[int, ...]) -> None:
    """Make op cast its arguments at these positions to the autocast dtype, and no others.

    torch.library.register_autocast would cast every tensor, and to a dtype fixed at registration.
    """

    def for_device(device_type: str) -> Callable[..., Any]:
        def convert(place: int, t: Any) -> Any:
            wanted = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
            return t.to(torch.get_autocast_dtype(device_type)) if wanted and place in cast else t

        def kernel(*args: Any) -> Any:
            with torch.autocast(device_type, enabled=False):  # else op(...) comes here again
                return op(*(convert(place, t) for place, t in enumerate(args)))

        return kernel

    name = op.name().removeprefix("fmoe_ext::")
    library.impl(name, for_device("cpu"), "AutocastCPU")
    library.impl(name, for_device("cuda"), "AutocastCUDA")


def cast_for_autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Cast tensors as an operator's autocast rule would; None and integers stay."""
    first = tensors[0]
    device = (first if first is not None else next(t for t in tensors if t is not None)).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises for "meta"
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
        for t in tensors
    )


def register_second_derivative(
    op_name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None
) -> None:
    """Give a backward's operator a gradient that call() alone uses; its kernels must refuse gradient mode."""
    _functional[op_name] = _make_functional(op_name, backward, setup_context)


def register_vmap_in_turn(op_name: str) -> None:
    """Make vmap compute the elements of a batch in turn; torch's own such rule refuses operators that may write."""
    op = getattr(torch.ops.fmoe_ext, op_name.removeprefix("fmoe_ext::"))

    def rule(
        info: Any, in_dims: Sequence[Any], *args: Any
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        def of(element: int) -> Any:
            return op(
                *(
                    arg.select(dim, element) if isinstance(arg, torch.Tensor) and dim is not None else arg
                    for arg, dim in zip(args, in_dims, strict=True)
                )
            )

        results = zip(*(of(element) for element in range(info.batch_size)), strict=True)
        stacked = tuple(torch.stack(result) for result in results)
        return stacked, (0,) * len(stacked)

    torch.library.register_vmap(op_name, rule)


def register_not_differentiable_twice(op_name: str) -> None:
    """Make a second differentiation raise, instead of giving gradients that lack a term."""
    register_second_derivative(op_name, _refusal(op_name, "second derivatives are not implemented"))


def register_not_differentiable(op_name: str, reason: str = "second derivatives are not implemented") -> None:
    """Make a differentiation of the operator itself raise; torch would warn and take its results for constants."""
    register_autograd(op_name, _refusal(op_name, reason))


def _refusal(op_name: str, reason: str) -> Callable[..., None]:
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{op_name} cannot be differentiated: {reason}")

    return backward
