"""Inputs of the tests of emulated products, and comparisons with the oracles of fmoe_ext.ops."""

import torch

from fmoe_ext import ops
from fmoe_ext.ops.activations import activation_number
from fmoe_ext.testing import assert_close

NAMES = ("y", "dx", "dw1", "db1", "dw2", "db2", "dtopk_weights")


def check(ours, truth, plain, name):
    if ours.dtype == torch.float64:  # plain is the truth here
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13, msg=lambda text: f"{name}: {text}")
    else:
        assert_close(ours, truth, plain, name)


def gradients(function, tensors, grad, dtype):
    """Result and gradients of function(*tensors) in dtype, None where a tensor is None."""
    leaves = [t if t is None else t.to(dtype).detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    if not out.requires_grad:  # there are no rows
        return [out, *(None for t in leaves)]
    needed = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad(out, needed, grad.to(dtype), allow_unused=True))
    return [out.detach(), *(None if t is None else next(grads) for t in leaves)]


def check_grouped_gemm(emulated, counts, D, N, dtype):
    E, R = len(counts), sum(counts) + 3
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((R, D), (E, N, D), (E, N), (R, N))
    )
    offs = torch.tensor(counts).cumsum(0).int()

    y = emulated.grouped_gemm(x, weight, offs, bias)
    grads = emulated.grouped_gemm_backward(grad, x, weight, offs, [True, True, True])

    def reference(x, weight, bias):
        return ops.grouped_gemm_ref(x, weight, offs, bias)

    truth = gradients(reference, (x, weight, bias), grad, torch.float64)
    plain = gradients(reference, (x, weight, bias), grad, dtype)
    for name, ours, true, other in zip(
        ("y", "dx", "dweight", "dbias"), (y, *grads), truth, plain, strict=True
    ):
        check(ours, true, other, name)
    if weight.shape[1] > 1:
        column_major = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(emulated.grouped_gemm(x, column_major, offs, bias), y)
    skipped = emulated.grouped_gemm_backward(grad, x, weight, offs, [False, True, False])
    assert [t.numel() > 0 for t in skipped] == [False, True, False]
    assert torch.equal(skipped[1], grads[1])


def mlp_inputs(T, K, E, D, H, dtype, gated, bias, weights, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    topk_idx = torch.randint(-1, E, (T, K), generator=generator)
    if E > 2:
        topk_idx[topk_idx == 1] = 2  # an expert without rows
    routing = ops.sort_tokens_ref(topk_idx, E)
    F = 2 * H if gated else H
    x, w1, w2 = random(T, D), random(E, F, D, scale=D**-0.5), random(E, D, H, scale=H**-0.5)
    b1, b2 = (random(E, F), random(E, D)) if bias else (None, None)
    topk_weights = torch.rand(T, K, generator=generator).to(weights) if weights else None
    return routing, (x, w1, b1, w2, b2, topk_weights)


def run_mlp(emulated, routing, tensors, activation, combine, grad):
    x, w1, b1, w2, b2, topk_weights = tensors
    index = (routing.row_idx, routing.inverse, routing.offs)
    options = (activation_number(activation), combine)
    y, h = emulated.expert_mlp(x, *index, w1, b1, w2, b2, topk_weights, *options, True)
    needs = [True, True, b1 is not None, True, b2 is not None, topk_weights is not None]
    grads = emulated.expert_mlp_backward(grad, x, *index, w1, w2, b2, topk_weights, h, *options, needs)
    return [y, *(grad if needed else None for grad, needed in zip(grads, needs, strict=True))]


def check_mlp(emulated, routing, tensors, activation, combine):
    x, topk_weights = tensors[0], tensors[-1]
    rows = x.shape[0] if combine else routing.row_idx.shape[0]
    grad = torch.randn(rows, x.shape[1], generator=torch.Generator().manual_seed(9)).to(x.dtype)

    def reference(x, w1, b1, w2, b2, weights):
        index = (routing.row_idx, routing.inverse, routing.offs)
        return ops.expert_mlp_ref(x, *index, w1, b1, w2, b2, weights, activation, combine)

    ours = run_mlp(emulated, routing, tensors, activation, combine, grad)
    truth, plain = (gradients(reference, tensors, grad, dtype) for dtype in (torch.float64, x.dtype))
    for name, one, true, other in zip(NAMES, ours, truth, plain, strict=True):
        if one is None:
            assert true is None
            continue
        if true is None:  # not used by any row
            assert not one.any(), name
            continue
        if name == "dtopk_weights" and topk_weights.dtype != x.dtype:
            other = other.to(topk_weights.dtype)
        check(one, true, other, name)


def wgmmas_of(emulated, op, *arguments):
    before = emulated.wgmmas()
    op(*arguments)
    return emulated.wgmmas() - before


def chosen(emulated, function, *arguments):
    """The names of the kernels that a call runs."""
    before = emulated._gpu_kernel_runs()
    function(*arguments)
    counts = zip(emulated._gpu_kernels(), before, emulated._gpu_kernel_runs(), strict=True)
    return [name for name, earlier, later in counts if later > earlier]
