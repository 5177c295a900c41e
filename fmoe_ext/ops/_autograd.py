"""Registrations that more than one operator needs and that torch.library does not offer."""

import torch


def register_autocast(library: torch.library.Library, op, cast: tuple[int, ...]) -> None:
    """Under autocast, op casts the arguments at the given positions to the autocast dtype, and no others.

    (torch.library.register_autocast casts every tensor, to a dtype fixed at registration.)
    """

    def for_device(device_type):
        def convert(place, t):
            wanted = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
            return t.to(torch.get_autocast_dtype(device_type)) if wanted and place in cast else t

        def kernel(*args):
            args = [convert(place, t) for place, t in enumerate(args)]
            with torch.autocast(device_type, enabled=False):
                return op(*args)

        return kernel

    name = op.name().removeprefix("fmoe_ext::")
    library.impl(name, for_device("cpu"), "AutocastCPU")
    library.impl(name, for_device("cuda"), "AutocastCUDA")


def register_not_differentiable_twice(op_name: str) -> None:
    """Makes a second differentiation raise instead of giving gradients that lack a term."""

    def backward(ctx, *grads):
        raise RuntimeError(f"{op_name} cannot be differentiated: second derivatives are not implemented")

    torch.library.register_autograd(op_name, backward)
