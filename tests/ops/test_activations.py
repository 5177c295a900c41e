"""The lists of activations in C++ against that of Python."""

import re
from pathlib import Path

import torch

import fmoe_ext
from fmoe_ext.models.recognize import GATED
from fmoe_ext.ops.activations import CURVES, GATED_ACTIVATIONS, KINDS, PLAIN_ACTIVATIONS

ROOT = Path(__file__).resolve().parents[2]


def test_operators_have_the_curves_in_the_order_of_python():
    text = (ROOT / "csrc/activation.h").read_text(encoding="utf-8")
    found = re.findall(r"\{CurveKind::(\w+), (true|false)\}", text)
    assert found == [(kind.curve, "true" if kind.gated else "false") for kind in KINDS]


def test_headers_have_the_names_in_the_order_of_python():
    text = (Path(fmoe_ext.__file__).parent / "include/fmoe/ops.h").read_text(encoding="utf-8")
    found = re.findall(r'\{"(\w+)", (true|false)\}', text)
    assert found == [(kind.name, "true" if kind.gated else "false") for kind in KINDS]


def test_lists_of_plain_and_gated_activations_follow():
    assert PLAIN_ACTIVATIONS == ("gelu", "gelu_tanh", "relu", "silu", "relu2")
    assert GATED_ACTIVATIONS == ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu")
    assert GATED == {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}


def test_curves_have_the_gradient_of_autograd():
    h = torch.linspace(-9, 9, 37, dtype=torch.float64, requires_grad=True)
    grad = torch.linspace(1, 2, 37, dtype=torch.float64)
    for name, curve in CURVES.items():
        (expected,) = torch.autograd.grad(curve.forward(h), h, grad)
        torch.testing.assert_close(curve.backward(grad, h.detach()), expected, msg=name)
