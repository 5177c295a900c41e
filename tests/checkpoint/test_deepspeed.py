"""DeepSpeed-MoE's folders, as its engine writes them, into our layers (docs/from_deepspeed.md)."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP, checkpoint
from fmoe_ext.checkpoint import convert
from fmoe_ext.checkpoint.cli import main
from fmoe_ext.checkpoint.deepspeed import read_deepspeed
from fmoe_ext.gates import SoftmaxGate

E, D, H = 4, 8, 12
INSIDE = "deepspeed_moe.experts.deepspeed_experts"
MLP = {"fc1.weight": (H, D), "fc1.bias": (H,), "fc2.weight": (D, H), "fc2.bias": (D,)}
SWIGLU = {"gate_proj.weight": (H, D), "up_proj.weight": (H, D), "down_proj.weight": (D, H)}
OTHER = {"norm.weight": (D,), "fc1.weight": (H, D), "fc2.weight": (D, H)}


def expert(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gate(seed):
    return torch.randn(E, D, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path):
    """The folder of an engine at step 3: layers 0 (MLPs) and 1 (SwiGLU), an embedding, a client state."""
    step = tmp_path / "global_step3"
    step.mkdir()
    (tmp_path / "latest").write_text("global_step3")
    module = {"embedding.weight": torch.ones(5, D)}
    for layer, shapes in enumerate((MLP, SWIGLU)):
        module[f"layers.{layer}.deepspeed_moe.gate.wg.weight"] = gate(layer)
        for e in range(E):
            state = {f"layers.{layer}.{INSIDE}.{e}.{n}": t for n, t in expert(shapes, 10 * layer + e).items()}
            torch.save(state, step / f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt")
    content = {
        "module": module,
        "global_steps": 3,
        "ds_version": "0.19.8",
        "num_experts": [E, E],
        "note": "x",
    }
    torch.save(content, step / "mp_rank_00_model_states.pt")
    torch.save({"optimizer": None}, step / "expp_rank_0_mp_rank_00_optim_states.pt")
    return tmp_path


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, D)
        common = {"num_expert": E, "d_model": D, "d_hidden": H, "gate_bias": False}
        first = functools.partial(SoftmaxGate, normalize=False)
        self.layers = nn.ModuleList(
            [
                FMoETransformerMLP(**common, activation="gelu", top_k=1, gate=first),
                FMoETransformerMLP(**common, activation="swiglu", bias=False, top_k=2, gate=SoftmaxGate),
            ]
        )


def deepspeeds(x, layer, k):
    """The formula of DeepSpeed's MoE without dropped tokens: top1gating and top2gating over their experts."""
    scores = F.softmax(x @ gate(layer).T, dim=1)
    weights, chosen = scores.topk(k)
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(E):
        p = expert((MLP, SWIGLU)[layer], 10 * layer + e)
        if layer == 0:
            y = F.linear(F.gelu(F.linear(x, p["fc1.weight"], p["fc1.bias"])), p["fc2.weight"], p["fc2.bias"])
        else:
            y = (F.silu(x @ p["gate_proj.weight"].T) * (x @ p["up_proj.weight"].T)) @ p["down_proj.weight"].T
        out += (weights * (chosen == e)).sum(1, keepdim=True) * y
    return out


@pytest.mark.parametrize("which", ["the folder of the step", "the folder with latest"])
def test_folder_becomes_our_checkpoint(folder, tmp_path, which):
    source = folder / "global_step3" if which == "the folder of the step" else folder
    main(["convert", str(source), "--to", "fmoe_ext", "-o", str(tmp_path / "ours")])
    model = Model()
    assert checkpoint.load(tmp_path / "ours", model).step == 3
    assert torch.equal(model.embedding.weight, torch.ones(5, D))
    x = torch.randn(7, D)
    for layer, k in enumerate((1, 2)):
        torch.testing.assert_close(model.layers[layer](x), deepspeeds(x, layer, k))


def test_other_experts_keep_their_parameters():
    state = {"moe.deepspeed_moe.gate.wg.weight": gate(0), "moe.coefficient.weight": torch.ones(2, D)}
    for e in range(E):
        state |= {f"moe.{INSIDE}.{e}.{name}": t for name, t in expert(OTHER, e).items()}
    ours = checkpoint.from_deepspeed(state)

    class Expert(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.norm, self.fc1, self.fc2 = (
                nn.RMSNorm(D),
                nn.Linear(D, H, bias=False),
                nn.Linear(H, D, bias=False),
            )

    layer = FMoE(num_expert=E, d_model=D, gate=SoftmaxGate, gate_bias=False, expert=Expert)
    assert torch.equal(ours.pop("moe.coefficient.weight"), torch.ones(2, D))
    layer.load_state_dict({name.removeprefix("moe."): t for name, t in ours.items()}, strict=True)
    assert torch.equal(layer.experts[2].norm.weight, expert(OTHER, 2)["norm.weight"])


def test_square_experts_are_taken_in_the_order_of_their_definition():
    square = {"b.weight": (D, D), "a.weight": (D, D)}
    state = {"deepspeed_moe.gate.wg.weight": gate(0)}
    for e in range(E):
        state |= {f"{INSIDE}.{e}.{name}": t for name, t in expert(square, e).items()}
    ours = checkpoint.from_deepspeed(state)
    assert torch.equal(ours["experts.htoh4.weight"][1], expert(square, 1)["b.weight"])
    assert torch.equal(ours["experts.h4toh.weight"][1], expert(square, 1)["a.weight"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda f: (f / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink(),
            r"4 experts, but there is none of \[2\]",
        ),
        (
            lambda f: _rewrite(f / "mp_rank_00_model_states.pt", ds_autoep_layers=[{}]),
            "AutoEP.*save_16bit_model",
        ),
        (lambda f: _rewrite(f / "mp_rank_00_model_states.pt", note=Model), "pass trust=True"),
        (lambda f: _rewrite(f / "mp_rank_00_model_states.pt", module=None), 'has no "module"'),
        (lambda f: torch.save({}, f / "mp_rank_01_model_states.pt"), "name one: mp_rank_00, mp_rank_01"),
        (lambda f: (f / "mp_rank_00_model_states.pt").write_bytes(b"PK\3\4no"), "cannot be read|damaged"),
    ],
    ids=["an expert is missing", "AutoEP", "pickled objects", "no model", "tensor parallel", "damaged"],
)
def test_damaged_and_other_files_are_refused(folder, change, text):
    change(folder / "global_step3")
    with pytest.raises(checkpoint.CheckpointError, match=text):
        convert.read(folder)


def _rewrite(file, **entries):
    torch.save(torch.load(file, weights_only=False) | entries, file)


def test_experts_that_differ_are_refused():
    state = {"deepspeed_moe.gate.wg.weight": gate(0)}
    for e in range(E):
        state |= {f"{INSIDE}.{e}.{name}": t for name, t in expert(MLP, e).items()}
    del state[f"{INSIDE}.3.fc2.bias"]
    with pytest.raises(checkpoint.CheckpointError, match="do not have the same parameters"):
        checkpoint.from_deepspeed(state)
    with pytest.raises(checkpoint.CheckpointError, match=r"there is no deepspeed_moe\.gate"):
        checkpoint.from_deepspeed({name: t for name, t in state.items() if "gate" not in name})


def test_latest_cannot_leave_the_folder(folder):
    (folder / "latest").write_text("../elsewhere")
    with pytest.raises(checkpoint.CheckpointError):
        convert.read(folder)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(
        checkpoint.CheckpointError, match=r"has no mp_rank_\*_model_states\.pt: give the folder"
    ):
        read_deepspeed(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="has no mp_rank_"):
        read_deepspeed(tmp_path, mp_rank="mp_rank_00")
    with pytest.raises(checkpoint.CheckpointError, match="none does not exist"):
        read_deepspeed(tmp_path / "none")
