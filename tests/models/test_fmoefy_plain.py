"""fmoefy on plain PyTorch: torch's own transformer layers, and MLPs that match= points at."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoETransformerMLP, fmoefy
from fmoe_ext.testing import assert_close

D, H = 8, 12
pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def encoder(layers=2, dropout=0.0, dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {"batch_first": True, **options}
    layer = nn.TransformerEncoderLayer(D, 2, H, dropout=dropout, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=options["batch_first"]).to(dtype)


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)


def max_error(a, b):
    return (a - b).abs().max().item()


def zero_experts(model):
    for module in model.modules():
        if isinstance(module, FMoETransformerMLP):
            nn.init.zeros_(module.experts.h4toh.weight)
    return model


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU(), torch.tanh])
@pytest.mark.parametrize("split", [1, 2])
def test_encoder(norm_first, batch_first, activation, split):
    """In training and in evaluation, where torch has a fused path that must not go past the experts."""
    dense = encoder(norm_first=norm_first, batch_first=batch_first, activation=activation, bias=split == 1)
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle", split=split)
    x = tokens(3, 4)
    assert max_error(moe(x), dense(x)) < 1e-12
    with torch.inference_mode():
        assert max_error(moe.eval()(x), dense.eval()(x)) < 1e-12
        assert max_error(zero_experts(moe)(x), dense(x)) > 1e-2


@pytest.mark.parametrize("layers", [None, 0, 1])
def test_padding_in_evaluation(layers):
    dense = encoder().eval()
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle", layers=layers)
    padding = torch.tensor([[False] * 4, [False, False, True, True], [False, True, True, True]])
    x = tokens(3, 4)
    with torch.inference_mode():
        expected = dense(x, src_key_padding_mask=padding)[~padding]
        assert max_error(moe(x, src_key_padding_mask=padding)[~padding], expected) < 1e-12
        assert max_error(zero_experts(moe)(x, src_key_padding_mask=padding)[~padding], expected) > 1e-2


def test_float32():
    truth = encoder()
    dense = copy.deepcopy(truth).float()
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle")
    x = tokens(3, 4)
    assert_close(moe(x.float()), truth(x), dense(x.float()))


def test_decoder_and_seq2seq():
    torch.manual_seed(0)
    dense = nn.Transformer(D, 2, 1, 2, H, dropout=0.0, batch_first=True, dtype=torch.float64)
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle")
    assert [r.path for r in moe.fmoe_report.replaced] == [
        "encoder.layers.0.linear1",
        "decoder.layers.0.linear1",
        "decoder.layers.1.linear1",
    ]
    for training in (True, False):
        x, y = tokens(3, 4), tokens(3, 5)
        assert max_error(moe.train(training)(x, y), dense.train(training)(x, y)) < 1e-12
    assert max_error(zero_experts(moe)(x, y), dense(x, y)) > 1e-2


def test_one_layer_alone_and_its_dropout():
    layer = nn.TransformerEncoderLayer(D, 2, H, dropout=0.1, batch_first=True)
    dense = copy.deepcopy(layer).eval()
    moe = fmoefy(layer, 4, init="upcycle")
    assert moe.fmoe_report.replaced[0].notes == ("its dropout (0.1) between the linear layers is left out",)
    assert moe.dropout2.p == 0.1 and isinstance(moe.linear1, FMoETransformerMLP)
    x = tokens(3, 4, dtype=torch.float32)
    with torch.inference_mode():
        assert_close(moe.eval()(x), copy.deepcopy(dense).double()(x.double()), dense(x))


def test_training_copies_and_state_dict():
    moe = fmoefy(encoder(), 4, init="upcycle", split=2)
    x = tokens(3, 4)
    moe(x).square().mean().backward()
    for name, p in moe.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        if ".gate." in name or ".experts." in name:
            assert (p.grad != 0).any(), name
    torch.optim.Adam(moe.parameters(), lr=0.01).step()
    expected = moe(x)
    fresh = fmoefy(encoder(), 4)
    assert max_error(fresh(x), expected) > 1e-3
    fresh.load_state_dict(moe.state_dict())
    for other in (fresh, copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert torch.equal(other(x), expected)
        with torch.inference_mode():
            assert max_error(other.eval()(x), expected) < 1e-12


def test_compile():
    moe = fmoefy(encoder(layers=1), 4, init="upcycle")
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    results = []
    for model in (moe, compiled):
        x = tokens(3, 4).requires_grad_()
        y = model(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *moe.parameters()])))
    for ours, expected in zip(*reversed(results), strict=True):
        assert max_error(ours, expected) < 1e-12


class GatedByName(nn.Module):
    """Llama's names in its own repository: w2 comes back to d_model; the activation is in forward alone."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(D, H, bias=False)
        self.w2 = nn.Linear(H, D, bias=False)
        self.w3 = nn.Linear(D, H, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GatedByRelu(GatedByName):
    def forward(self, x):
        return self.w2(F.relu(self.w1(x)) * self.w3(x))


class UpFirst(nn.Module):
    """One matrix for both halves, the gate being the second."""

    def __init__(self):
        super().__init__()
        self.proj_in = nn.Linear(D, 2 * H)
        self.proj_out = nn.Linear(H, D)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        up, gate = self.proj_in(x).chunk(2, -1)
        return self.drop(self.proj_out(up * F.gelu(gate)))


class Square(nn.Module):
    """d_model hidden units: shapes alone do not tell which matrix is which."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)
        self.up = nn.Linear(D, D)
        self.gate = nn.Linear(D, D)

    def forward(self, x):
        return self.out(self.up(x) * F.gelu(self.gate(x), approximate="tanh"))


def sequential(*between):
    return nn.Sequential(nn.Linear(D, H), *between, nn.Linear(H, D))


MLPS = [
    (lambda: sequential(nn.ReLU()), "relu", ()),
    (lambda: sequential(nn.GELU("tanh"), nn.Dropout(0.3)), "gelu_tanh", ("its dropout between",)),
    (lambda: nn.Sequential(*sequential(nn.SiLU()), nn.Dropout(0.3)), "silu", ()),
    (lambda: sequential(nn.Hardswish()), "Hardswish()", ()),
    (GatedByName, "swiglu", ()),
    (GatedByRelu, "GatedActivation(ReLU())", ()),
    (UpFirst, "geglu", ()),
    (Square, "geglu_tanh", ()),
]


@pytest.mark.parametrize(("make", "activation", "notes"), MLPS)
@pytest.mark.parametrize("init", ["random", "upcycle"])
def test_matched_mlps(make, activation, notes, init):
    torch.manual_seed(0)
    dense = nn.ModuleDict({"ffn": make(), "head": nn.Linear(D, 3)}).double()
    modes = [m.training for m in dense.modules()]
    moe = fmoefy(copy.deepcopy(dense), 4, match="ffn", init=init)
    report = moe.fmoe_report.replaced[0]
    assert report.activation == activation
    assert len(report.notes) == len(notes) and all(map(str.startswith, report.notes, notes))
    dropouts = [m.p for m in dense.ffn.modules() if isinstance(m, nn.Dropout)]
    kept = [m.p for m in moe.ffn.modules() if isinstance(m, nn.Dropout)]
    assert kept == ([] if notes else dropouts)
    assert [m.training for m in dense.modules()] == modes
    x = tokens(3, 4)
    error = max_error(moe.ffn.eval()(x), dense.ffn.eval()(x))
    assert error < 1e-12 if init == "upcycle" else error > 1e-3
    if kept:
        assert max_error(moe.ffn.train()(x), dense.ffn.eval()(x)) > 1e-2


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(D, H), nn.Linear(H, D), nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(self.fc2(F.relu(self.fc1(x))))


class TwoArguments(WithNorm):
    def forward(self, x, residual):
        return residual + self.fc2(F.relu(self.fc1(x)))


class GatedBySine(GatedByName):
    def forward(self, x):
        return self.w2(torch.sin(self.w1(x)) * self.w3(x))


class Scaled(WithNorm):
    def forward(self, x):
        return self.fc2(F.relu(self.fc1(2 * x)))


UNREADABLE = [
    (lambda: nn.Linear(D, D), "it has 1 linear layers"),
    (WithNorm, "something other than dropout follows its last linear layer"),
    (TwoArguments, r"calling it with one tensor \[2, 3, 8\] fails"),
    (GatedBySine, "computes none of"),
    (Scaled, "its first linear layer is not applied to its input"),
    (lambda: sequential(nn.LayerNorm(H), nn.ReLU()), "computes none of"),
]


@pytest.mark.parametrize(("make", "why"), UNREADABLE)
def test_other_modules_are_not_upcycled(make, why):
    model = nn.ModuleDict({"ffn": make()})
    with pytest.raises(ValueError, match=why):
        fmoefy(model, 4, match="ffn", init="upcycle")
    with pytest.raises(ValueError, match="activation= must be given for ffn: "):
        fmoefy(model, 4, match="ffn")
    if "activation" not in why and "computes" not in why:  # where that alone is not known, the sizes are
        with pytest.raises(ValueError, match="hidden_hidden_size= must be given for ffn: "):
            fmoefy(model, 4, match="ffn", activation="relu")
    with pytest.raises(ValueError, match=why):
        fmoefy(model, 4, match="ffn", activation="relu", init="upcycle")
    assert not isinstance(model.ffn, FMoETransformerMLP)
    fmoefy(model, 4, match="ffn", activation="relu", hidden_hidden_size=5)
    assert model.ffn.d_hidden == 5
    x = tokens(6, dtype=torch.float32)
    assert 0 < model.ffn(x).std() < 10


def test_weights_that_cannot_be_read():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(D, 2, H)
    with pytest.raises(ValueError, match="in_proj_weight is on the meta device: load the model first"):
        fmoefy(layer, 4)
    model = nn.ModuleDict({"ffn": sequential(nn.ReLU())})
    model.ffn[0].weight = nn.Parameter(torch.ones(H, D, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"its weights are torch\.int8"):
        fmoefy(model, 4, match="ffn", init="upcycle")


def test_match_of_another_kind():
    with pytest.raises(TypeError, match="match must be a class, a pattern of paths or a function"):
        fmoefy(nn.ModuleDict({"ffn": sequential(nn.ReLU())}), 4, match=3)
    with pytest.raises(ValueError, match="points at the model itself"):
        fmoefy(sequential(nn.ReLU()), 4, match=nn.Sequential)


def test_mlp_of_two_names_is_replaced_under_both():
    """The second name kept the dense MLP, and a forward by it computed no expert."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))
            self.feed_forward = self.mlp

        def forward(self, x):
            return x + self.feed_forward(x)

    model = fmoefy(nn.Sequential(Block(), Block()), 4, match="*.mlp")
    for block in model:
        assert isinstance(block.feed_forward, FMoETransformerMLP) and block.feed_forward is block.mlp
    assert model[0].mlp is not model[1].mlp
    x = tokens(3, dtype=torch.float32)
    assert torch.equal(zero_experts(model)(x), x)  # experts of zero weights, whose biases begin as 0
