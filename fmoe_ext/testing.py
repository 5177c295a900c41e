"""What the tests, the benchmarks and users of custom layers need to check numbers against a float64 truth."""

import torch


def devices():
    """Devices that tests run on: the CPU, and the first CUDA device where there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def assert_close(ours, truth, plain, name="result"):
    """Checks |ours - truth| <= 2 * |plain - truth| + tiny(dtype), in the norm and in the largest element.

    ours and plain have the dtype under test (plain: the same formula in plain PyTorch), truth is float64.
    The rule adapts to dtype and shape by itself; data movement is compared with torch.equal instead.
    """
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    assert ours.dtype == plain.dtype, f"{name}: dtype {ours.dtype}, expected {plain.dtype}"
    if ours.numel() == 0:
        return
    truth = truth.detach().double().cpu()
    ours_error = (ours.detach().double().cpu() - truth).abs()
    plain_error = (plain.detach().double().cpu() - truth).abs()
    assert torch.isfinite(ours_error).all(), (
        f"{name}: not finite at {(~torch.isfinite(ours_error)).nonzero()[0].tolist()}"
    )
    eps = torch.finfo(ours.dtype).eps
    for measure, reduce in (("norm", torch.linalg.vector_norm), ("largest element", torch.max)):
        limit = 2 * reduce(plain_error) + 2 * eps * reduce(truth.abs())
        error = reduce(ours_error)
        assert error <= limit, (
            f"{name}: error in the {measure} is {error:.3e}, allowed {limit:.3e} "
            f"(plain PyTorch {reduce(plain_error):.3e}), worst at index "
            f"{torch.unravel_index(ours_error.argmax(), ours_error.shape)}"
        )
