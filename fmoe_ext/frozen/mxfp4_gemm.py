"""grouped_gemm with a frozen MXFP4 weight on CUDA, decoded by the kernels themselves."""

import torch

_library = torch.library.Library("fmoe_ext", "IMPL")  # its registrations live as long as it does
# For devices without such kernels; those of cuda/ return the same where none of them is on and fits.
_library.impl("_mxfp4_gemm", lambda x, *_: x.new_empty(0), "CompositeExplicitAutograd")


def mxfp4_gemm(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
    interleaved: bool,
) -> torch.Tensor | None:
    """x @ weight[e].T + bias[e] on the rows of each expert, or x @ weight[e] if transposed, without decoding in memory.

    data [E, out, in / 2] and scale [E, out, in / 32], uint8, are those of a Quantized in mxfp4. interleaved: its rows
    are gate, up, ...; the result, or x if transposed, has gates before ups.
    None if no kernel can: on the CPU, without a proof (ops.gpu_kernels), for another dtype than bfloat16, without rows.
    """
    y: torch.Tensor = torch.ops.fmoe_ext._mxfp4_gemm(x, data, scale, offs, bias, transposed, interleaved)
    return y if y.dim() == 2 else None
