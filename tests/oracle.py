"""Mixture of experts as a loop over tokens and choices, differentiable: the truth for the layer tests."""

import copy

import torch
import torch.nn.functional as F


def clamped(gate, up):
    """GPT-OSS's activation."""
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": lambda h: F.silu(h[: len(h) // 2]) * h[len(h) // 2 :],
    "geglu": lambda h: F.gelu(h[: len(h) // 2]) * h[len(h) // 2 :],
    "geglu_tanh": lambda h: F.gelu(h[: len(h) // 2], approximate="tanh") * h[len(h) // 2 :],
    "relu2": lambda h: F.relu(h) ** 2,
    "clamped_swiglu": lambda h: clamped(h[: len(h) // 2], h[len(h) // 2 :]),
}


def mix(x, topk_idx, topk_weights, experts):
    """out[t] = sum_k topk_weights[t, k] * experts[topk_idx[t, k]](x[t]), dropped choices (-1) left out."""
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros_like(experts[0](x[t]))
        for k, e in enumerate(topk_idx[t].tolist()):
            if e >= 0:
                row = row + topk_weights[t, k].to(x.dtype) * experts[e](x[t])
        rows.append(row)
    return torch.stack(rows)


def expert_functions(experts, activation):
    """The functions row -> row that FusedExperts stands for."""

    def function(e):
        def apply(row):
            h = experts.htoh4.weight[e] @ row
            h = h if experts.htoh4.bias is None else h + experts.htoh4.bias[e]
            y = experts.h4toh.weight[e] @ activation(h)
            return y if experts.h4toh.bias is None else y + experts.h4toh.bias[e]

        return apply

    return [function(e) for e in range(experts.num_experts)]


def softmax_weights(gate, x, topk_idx, normalize=True):
    """The weights of given choices of a NaiveGate, in the dtype of x."""
    logits = F.linear(x, gate.gate.weight, gate.gate.bias)
    chosen = topk_idx.clamp(min=0)
    return logits.gather(1, chosen).softmax(-1) if normalize else logits.softmax(-1).gather(1, chosen)


def run_layer(layer, x, grad_out):
    """Output and the gradients of x and every parameter, by name."""
    x = x.detach().requires_grad_()
    out = layer(x)
    names, params = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, (x, *params), grad_out.to(out.dtype))
    return {"out": out.detach(), "x": grads[0], **dict(zip(names, grads[1:], strict=True))}


def run_oracle(layer, x, grad_out, topk_idx, activation, dtype):
    """Result of run_layer for an FMoETransformerMLP with a NaiveGate, by the oracle in dtype."""
    layer = copy.deepcopy(layer).to(dtype)

    def forward(x):
        weights = softmax_weights(layer.gate, x, topk_idx, layer.gate.normalize)
        return mix(x, topk_idx, weights, expert_functions(layer.experts, activation))

    x = x.detach().to(dtype).requires_grad_()
    out = forward(x)
    names, params = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, (x, *params), grad_out.to(dtype))
    return {"out": out.detach(), "x": grads[0], **dict(zip(names, grads[1:], strict=True))}
