"""FMoETransformerMLP: arguments and tokens that are taken, and those that are refused by name."""

import inspect
import warnings
from collections import UserList
from typing import get_type_hints

import pytest
import torch
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP
from fmoe_ext.layers import LayerOptions
from fmoe_ext.transformer import MLPOptions

D, H, E = 6, 10, 5


def make_layer(**options):
    options = {"num_expert": E, "d_model": D, "d_hidden": H, "top_k": 2, **options}
    return FMoETransformerMLP(**options).double()


@pytest.mark.bad_indices
def test_rejects():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"\[\.\.\., d_model=6\], but got \[13, 7\]"):
        layer(torch.randn(13, D + 1))
    with pytest.raises(ValueError, match="top_k must be between 1 and the 5 experts, but got 6"):
        make_layer(top_k=6)
    with pytest.raises(ValueError, match=r"activation must be one of gelu, .* but got 'tanh'"):
        make_layer(activation="tanh")
    with pytest.raises(TypeError, match="activation must be a name or a callable, but got 3"):
        make_layer(activation=3)
    with pytest.raises(
        TypeError, match=r"tokens are torch\.float64, but the weights of their experts torch\.float32: "
    ):
        make_layer().float()(torch.zeros(3, D, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed\.init_process_group"):
        make_layer(world_size=2)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.cpu("its autocast is the one that is tested")
@pytest.mark.parametrize("weights", FLOATS)
@pytest.mark.parametrize("tokens", FLOATS)
def test_tokens_are_cast_to_the_dtype_of_the_weights_but_float64_never(tokens, weights):
    layer, x = make_layer().to(weights), torch.randn(3, D, dtype=tokens)
    if tokens == torch.float64 != weights:
        with pytest.raises(TypeError, match=r"tokens are torch\.float64, but the weights of their experts"):
            layer(x)
        return
    with torch.no_grad():
        topk_idx, topk_weights = layer.gate(x)
        # the gate gets tokens in their own dtype and could choose otherwise: keep its choice for both calls
        layer.gate.forward = lambda inp: (topk_idx, topk_weights)
        out = layer(x)
        assert out.dtype == weights
        assert torch.equal(out, layer(x.to(weights)))


@pytest.mark.cpu("names the CPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_dtype_are_those_of_all_parameters(dtype):
    layer = FMoETransformerMLP(
        E, D, 5, gate="sigmoid", shared_expert_hidden=3, shared_expert_gate=True, device="cpu", dtype=dtype
    )
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer.gate.expert_bias.dtype == torch.float32
    assert layer(torch.randn(3, D, dtype=dtype)).dtype == dtype
    separate = FMoE(E, D, expert=lambda d: nn.Linear(d, d), dtype=dtype)
    assert {p.dtype for p in separate.parameters()} == {dtype}
    meta = FMoETransformerMLP(E, D, 5, gate="sigmoid", shared_expert_hidden=3, device="meta")
    assert {t.device.type for t in (*meta.parameters(), *meta.buffers())} == {"meta"}
    torch.manual_seed(3)
    ours = FMoETransformerMLP(E, D, 5, device="cpu", dtype=torch.float32).state_dict()
    torch.manual_seed(3)
    for name, value in FMoETransformerMLP(E, D, 5).state_dict().items():
        assert torch.equal(ours[name], value)


def test_arguments_of_the_layer_are_named_and_typed():
    ours = inspect.signature(FMoETransformerMLP.__init__).parameters
    theirs = inspect.signature(FMoE.__init__).parameters
    hints, of_layer = (get_type_hints(cls.__init__) for cls in (FMoETransformerMLP, FMoE))
    options = get_type_hints(MLPOptions)
    for name, parameter in theirs.items():
        if name in ours and name not in ("self", "options", "d_model"):  # d_model must be given
            assert ours[name].default == parameter.default
        if name not in ("self", "expert", "options", "d_model"):
            assert {**options, **hints}[name] == of_layer[name]
    assert get_type_hints(LayerOptions).items() <= {**options, **hints}.items()
    assert len(ours) - len(("self", "options")) <= 16


@pytest.mark.parametrize("cls", [FMoE, FMoETransformerMLP])
def test_number_of_experts_is_given_in_all_or_for_a_rank(cls):
    for given in ({"num_experts": 6}, {"num_expert": 6}):
        layer = cls(**given, d_model=D, top_k=1)
        assert (layer.num_experts, layer.num_local_experts) == (6, 6)
    assert cls(d_model=D).num_experts == 32
    with pytest.raises(ValueError, match=r"num_experts=6 .* and num_expert=6 .* say the same thing"):
        cls(num_experts=6, num_expert=6, d_model=D)
    with pytest.raises(ValueError, match=r"num_experts=7 .* must be a multiple of the 2 ranks"):
        cls(num_experts=7, world_size=2, d_model=D)
    with pytest.raises(ValueError, match="num_experts must be at least 1, but got 0"):
        cls(num_experts=0, d_model=D)
    with pytest.raises(TypeError, match=r"'n_experts' \(did you mean 'num_experts'\?\)"):
        cls(n_experts=6, d_model=D)


def test_number_of_experts_and_their_list_agree():
    experts = [nn.Identity] * 3
    assert (
        FMoE(num_experts=3, d_model=D, expert=[lambda d_model: nn.Linear(d_model, d_model)] * 3).num_experts
        == 3
    )
    with pytest.raises(ValueError, match=r"num_experts=4 gives each of 1 ranks 4 experts, .* a list of 3"):
        FMoE(num_experts=4, d_model=D, expert=experts)
    # as in FastMoE, a list wins over num_expert, whatever kind of list it is
    linear = [lambda d_model: nn.Linear(d_model, d_model)] * 3
    for kind in (list, tuple, UserList):
        layer = FMoE(num_expert=5, d_model=D, expert=kind(linear))
        assert layer.num_experts == layer.num_local_experts == len(layer.experts) == 3
    with pytest.raises(TypeError, match=r"expert= is a callable, or a list of them, but got <generator"):
        FMoE(num_expert=3, d_model=D, expert=(make for make in linear))


@pytest.mark.parametrize(
    ("name", "size", "error"),
    [
        ("d_model", 0, "at least 1, but got 0"),
        ("d_hidden", 0, "at least 1, but got 0"),
        ("num_expert", 2.5, "a whole number, but got 2"),
        ("d_model", "16", "a whole number, but got '16'"),
    ],
)
def test_sizes_that_are_none(name, size, error):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be {error}"):
        FMoETransformerMLP(**{"num_expert": 4, "d_model": 8, "d_hidden": 6, name: size})


def test_layer_without_d_model_asks_for_it():
    with pytest.raises(TypeError, match=r"FMoETransformerMLP needs d_model, .*num_experts=8, d_model=512"):
        FMoETransformerMLP()
    with pytest.raises(TypeError, match="needs d_model"):
        FMoETransformerMLP(num_expert=2, d_hidden=4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda h: h[:4], ValueError, "one number of tokens"),
        (lambda h: h[:, :8], ValueError, r"gate_inp must have shape \[..., d_model=16\], but got \[5, 8\]"),
        (lambda h: h.long(), TypeError, "gate_inp must have tokens of a floating dtype, but got torch.int64"),
    ],
)
def test_wrong_inputs_of_a_gate_are_refused_by_name(change, error, message):
    layer = FMoETransformerMLP(num_expert=4, d_model=16, d_hidden=8)
    with pytest.raises(error, match=message):
        layer(torch.randn(5, 16), gate_inp=change(torch.randn(5, 16)))


@pytest.mark.parametrize(
    ("keyword", "text"),
    [
        ("hidden_size", "d_hidden is the width inside an expert, d_model that of a token"),
        ("intermediate_size", "did you mean 'd_hidden'"),
        ("num_experts_per_tok", "did you mean 'top_k'"),
        ("dropout", "put nn.Dropout behind the layer"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(keyword, text):
    with pytest.raises(TypeError, match=text):
        FMoETransformerMLP(4, 8, **{keyword: 2})


def test_width_that_is_left_out_follows_the_tokens():
    layer = FMoETransformerMLP(2, 8)
    assert layer.d_hidden == 32 and layer.experts.htoh4.weight.shape == (2, 32, 8)


def dtensor(x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x.numpy(), r"a ndarray: make one with torch.as_tensor\(x\)"),
        (lambda x: {"x": x}, "a dict: a nest of tensors needs an FMoE"),
        (lambda x: nn.utils.rnn.pack_sequence([x]), r"a PackedSequence: call the layer on x.data"),
        (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), r"nested.*x.values\(\)"),
        (dtensor, r"a DTensor: pass x.to_local\(\)"),
    ],
    ids=["numpy", "dict", "packed", "jagged", "dtensor"],
)
def test_input_that_is_no_plain_tensor_is_named(make, text, one_process_group):
    with pytest.raises(TypeError, match=f"inp must be a plain tensor, but is .*{text}"):
        FMoETransformerMLP(2, 8)(make(torch.randn(5, 8)))


@pytest.mark.parametrize("gate", ["naive", "softmax"])
def test_tokens_on_another_device_are_named(gate):
    layer = FMoETransformerMLP(2, 8, gate=gate)
    with pytest.raises(RuntimeError, match=r"tokens are on meta, but the gate's weight on cpu: .*layer.to"):
        layer(torch.randn(5, 8, device="meta", requires_grad=True))


def test_cast_of_tokens_warns_once(monkeypatch):
    monkeypatch.setattr("fmoe_ext.linear._noted_casts", set())
    layer, x = FMoETransformerMLP(2, 8).bfloat16(), torch.randn(5, 8)
    text = r"tokens are torch.float32 and are cast to torch.bfloat16.*layer.to\(torch.float32\).*autocast"
    with pytest.warns(UserWarning, match=text):
        assert layer(x).dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer.float()(x)
