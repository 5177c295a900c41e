"""Layers of Transformers and ours with each other's weights: equal outputs; every layout there and back."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fmoe_ext import FMoETransformerMLP, SoftmaxGate
from fmoe_ext.checkpoint import CheckpointError, from_huggingface, huggingface, to_huggingface
from fmoe_ext.checkpoint.base_experts import BaseExperts
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.testing import assert_close

D, H, E, K = 8, 6, 4, 2


def qwen3_moe(norm_topk_prob=True):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=H,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=norm_topk_prob,
        experts_implementation="eager",
    )
    return qwen3.Qwen3MoeSparseMoeBlock(config)


def mixtral():
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig

    config = MixtralConfig(
        hidden_size=D,
        intermediate_size=H,
        num_local_experts=E,
        num_experts_per_tok=K,
        experts_implementation="eager",
    )
    return modeling_mixtral.MixtralSparseMoeBlock(config)


BLOCKS = {"qwen3_moe": qwen3_moe, "qwen3_moe, not normalised": lambda: qwen3_moe(False), "mixtral": mixtral}


def ours(normalize=True, **options):
    gate = functools.partial(SoftmaxGate, normalize=normalize, gate_bias=False)
    return FMoETransformerMLP(E, D, H, activation="swiglu", bias=False, gate=gate, top_k=K, **options)


def randomised(module, seed=0):
    torch.manual_seed(seed)
    for param in module.parameters():
        nn.init.normal_(param, std=0.3)
    return module


def in_model(block_state):
    """The state dict of a layer as that of layer 3 of a model, with tensors beside it."""
    state = {f"model.layers.3.mlp.{key}": value for key, value in block_state.items()}
    return {
        "model.layers.3.self_attn.q_proj.weight": torch.randn(3, 3),
        **state,
        "lm_head.weight": torch.randn(2, 3),
    }


def assert_same_states(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def by_formula(state, x, normalize):
    """The block in float64; Transformers has its gate in float32 at best."""
    state = {key: value.double() for key, value in state.items()}
    x = x.double().reshape(-1, D)
    weights, chosen = (x @ state["gate.weight"].t()).softmax(-1).topk(K)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    out = torch.zeros_like(x)
    for t, k in torch.cartesian_prod(torch.arange(len(x)), torch.arange(K)).tolist():
        gate, up = (state["experts.gate_up_proj"][chosen[t, k]] @ x[t]).chunk(2)
        out[t] += weights[t, k] * (state["experts.down_proj"][chosen[t, k]] @ (nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("kind", BLOCKS)
def test_transformers_weights_in_our_layer(kind):
    block = randomised(BLOCKS[kind]())
    normalize = "not" not in kind
    layer = ours(normalize)
    layer.load_state_dict(from_huggingface(block.state_dict()))
    x = torch.randn(2, 5, D)
    truth = by_formula(block.state_dict(), x, normalize).reshape(x.shape)
    assert_close(layer(x), truth, block(x), "output")
    torch.testing.assert_close(layer.double()(x.double()), truth, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(block(x).double(), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_our_weights_in_transformers_layer(kind):
    layer = randomised(ours())
    block = BLOCKS[kind]()
    block.load_state_dict(to_huggingface(layer.state_dict(), "fused"))
    x = torch.randn(2, 5, D)
    truth = by_formula(block.state_dict(), x, normalize=True).reshape(x.shape)
    assert_close(block(x), truth, layer(x), "output")
    torch.testing.assert_close(layer(x).double(), truth, rtol=1e-4, atol=1e-6)


def by_hand(layout, state, prefix):
    """The per-expert layouts, written down independently of the code under test."""
    gate_up, down = state["experts.gate_up_proj"], state["experts.down_proj"]
    names = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}[layout]
    out = {f"{prefix}gate.weight": state["gate.weight"]}
    for e in range(E):
        for name, value in zip(names, (gate_up[e, :H], gate_up[e, H:], down[e]), strict=True):
            out[f"{prefix}experts.{e}.{name}.weight"] = value
    return out


@pytest.mark.parametrize("layout", ["qwen3_moe", "mixtral"])
def test_per_expert_layouts(layout):
    fused = randomised(qwen3_moe()).state_dict()
    prefix = "model.layers.3." + {"qwen3_moe": "mlp.", "mixtral": "block_sparse_moe."}[layout]
    whole = in_model(fused)
    state = from_huggingface(whole)
    assert state["model.layers.3.mlp.experts.htoh4.weight"].shape == (E, 2 * H, D)
    assert state["lm_head.weight"] is not None
    per_expert = to_huggingface(state, layout)
    expected = by_hand(layout, fused, prefix)
    others = {key: value for key, value in whole.items() if ".mlp." not in key}
    assert_same_states(per_expert, expected | others)
    shuffled = dict(sorted(per_expert.items(), key=lambda item: hash(item[0])))
    assert_same_states(from_huggingface(shuffled), state)
    assert_same_states(to_huggingface(state, "fused"), whole)


def test_files_that_transformers_writes(tmp_path):
    from safetensors.torch import load_file
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = dict(
        vocab_size=16,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    for name, model in {
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**common, moe_intermediate_size=H, num_experts=E, num_experts_per_tok=K)
        ),
        "mixtral": MixtralForCausalLM(
            MixtralConfig(**common, intermediate_size=H, num_local_experts=E, num_experts_per_tok=K)
        ),
    }.items():
        randomised(model).save_pretrained(tmp_path / name)
        in_file = load_file(tmp_path / name / "model.safetensors")
        converted = from_huggingface(in_file)
        in_memory = from_huggingface(model.state_dict())
        assert_same_states(
            {k: converted[k] for k in in_memory if k in converted}, {k: in_memory[k] for k in converted}
        )
        assert converted["model.layers.0.mlp.experts.h4toh.weight"].shape == (E, D, H)
        assert_same_states(to_huggingface(converted, name), in_file)


def test_inconvertible_tensors_are_refused():
    state = ours().state_dict()
    biased = FMoETransformerMLP(E, D, H, activation="swiglu").state_dict()
    for name in ("htoh4", "h4toh"):
        biased[f"experts.{name}.bias"].zero_()
    no_gate_bias = {key: value for key, value in biased.items() if key != "gate.gate.bias"}
    assert to_huggingface(no_gate_bias).keys() == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    no_gate_bias["experts.h4toh.bias"][0, 1] = 1e-3
    with pytest.raises(CheckpointError, match=r"experts\.h4toh\.bias is not zero"):
        to_huggingface(no_gate_bias)
    with pytest.raises(
        CheckpointError, match=r"layout must be one of fused, afmoe, .*qwen3_next, .*but got 'gpt2'"
    ):
        to_huggingface(state, "gpt2")
    with pytest.raises(CheckpointError, match="are no SwiGLU experts"):
        to_huggingface(FMoETransformerMLP(E, D, H, bias=False, gate_bias=False).state_dict())
    with pytest.raises(CheckpointError, match=r"gate\.expert_bias has no place"):
        to_huggingface({**state, "gate.expert_bias": torch.zeros(E)})
    with pytest.raises(CheckpointError, match="there is no FMoETransformerMLP"):
        to_huggingface({"weight": torch.zeros(2)})
    per_expert = to_huggingface(state, "qwen3_moe")
    missing = {key: value for key, value in per_expert.items() if key != "experts.1.up_proj.weight"}
    with pytest.raises(
        CheckpointError, match=r"1 tensors are missing, the first is experts\.1\.up_proj\.weight$"
    ):
        from_huggingface(missing)
    fewer = {key: value for key, value in per_expert.items() if ".3." not in key}
    with pytest.raises(CheckpointError, match=r"gate\.weight \[4, 8\].* do not fit"):
        from_huggingface(fewer)
    with pytest.raises(CheckpointError, match=r"of .* differ: "):
        from_huggingface({**per_expert, "experts.2.down_proj.weight": torch.zeros(D, H + 1)})


@pytest.mark.parametrize("kept, missing", [("gate_up", "down"), ("down", "gate_up")])
def test_one_bias_of_two_is_refused(kept, missing):
    """It was left out in silence."""
    state = {
        "model.layers.0.mlp.gate.weight": torch.ones(E, D),
        "model.layers.0.mlp.experts.gate_up_proj": torch.ones(E, D, 2 * H),
        "model.layers.0.mlp.experts.down_proj": torch.ones(E, H, D),
        f"model.layers.0.mlp.experts.{kept}_proj_bias": torch.ones(E, 2 * H if kept == "gate_up" else D),
    }
    with pytest.raises(
        CheckpointError, match=rf"experts\.{kept}_proj_bias is there, but .*{missing}_proj_bias is"
    ):
        from_huggingface(state)


def test_stack_without_its_partner_is_not_lost_beside_numbered_experts():
    state = {"gate.weight": torch.ones(E, D), "experts.gate_up_proj": torch.ones(E, 2 * H, D)}
    for e in range(E):
        shapes = {"gate_proj": (H, D), "up_proj": (H, D), "down_proj": (D, H)}
        state |= {f"experts.{e}.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    assert torch.equal(from_huggingface(state)["experts.gate_up_proj"], state["experts.gate_up_proj"])


@pytest.mark.parametrize("is_stack", [True, False], ids=["stack", "numbered"])
def test_experts_without_a_gate_are_found_by_their_names(is_stack, tmp_path):
    """For adapters, of an architecture that Transformers does not know: the base was said to have no experts."""
    path = "model.layers.0.mlp.experts"
    tensors = {f"{path}.up_proj": torch.ones(E, H, D), f"{path}.down_proj": torch.ones(E, D, H)}
    if not is_stack:
        tensors = {
            f"{path}.{e}.{leaf}.weight": torch.ones(shape)
            for e in range(E)
            for leaf, shape in {"up_proj": (H, D), "down_proj": (D, H)}.items()
        }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of tomorrow"}))
    found = BaseExperts(ModelFolder(tmp_path)).at(path)
    assert (found.num_experts, found.d_model, found.d_hidden, found.is_stack) == (E, D, H, is_stack)
    assert not found.has_gate and {name for names in found.names.values() for name in names} == tensors.keys()


def sharded(folder):
    """A small model in several shards -> its tensors by shard."""
    from tests.finetune.streamed_models import save

    save(folder, dtype=torch.float32, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = [{n: tensors[n] for n in names[i::2]} for i in range(2)]
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"model-{i}.safetensors", {"format": "pt"})
    places = {name: f"model-{i}.safetensors" for i, shard in enumerate(shards) for name in shard}
    write_index(folder, places)
    return tensors, places


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_index_says_which_of_two_tensors_of_a_name_is_the_models(tmp_path):
    """Folders are changed by a file more, whose tensors the index has there; the old ones stay in their shards."""
    tensors, places = sharded(tmp_path / "model")
    replaced = [name for name in tensors if ".experts.3." in name] + ["model.norm.weight"]
    for new in ("a.safetensors", "model-overlay.safetensors"):  # before and behind the others
        save_file({n: tensors[n] * 2 for n in replaced}, tmp_path / "model" / new, {"format": "pt"})
        write_index(tmp_path / "model", places | dict.fromkeys(replaced, new))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.norm.weight
        if new == "a.safetensors":
            assert torch.equal(theirs, tensors["model.norm.weight"])  # Transformers does not ask the index
            for read in (lambda folder: folder.tensors, huggingface.read_model):
                with pytest.raises(
                    CheckpointError, match=r"the index names a\.safetensors, but Transformers reads"
                ):
                    read(ModelFolder(tmp_path / "model"))
            (tmp_path / "model" / new).unlink()
    base = ModelFolder(tmp_path / "model")
    found = huggingface.read_model(base)[0]
    assert base.tensors.keys() == tensors.keys()
    assert sum(len(names) for names in base.files.values()) == len(tensors)
    for name, value in tensors.items():
        expected = 2 * value if name in replaced else value
        assert torch.equal(base.tensors[name].read(), expected), name
    assert torch.equal(found["model.norm.weight"].read(), theirs)
    w2 = found["model.layers.1.mlp.experts.h4toh.weight"].read()
    assert torch.equal(w2[3], 2 * tensors["model.layers.1.mlp.experts.3.down_proj.weight"])
    (tmp_path / "model" / new).unlink()
    other = {"model-0.safetensors": "model-1.safetensors", "model-1.safetensors": "model-0.safetensors"}
    write_index(tmp_path / "model", {n: other[file] for n, file in places.items()})  # where none of them is
    assert ModelFolder(tmp_path / "model").tensors.keys() == tensors.keys()
    name = next(n for n, file in places.items() if file == "model-1.safetensors")
    save_file({name: tensors[name]}, tmp_path / "model/more.safetensors")
    write_index(
        tmp_path / "model", {n: f for n, f in places.items() if n != name} | {"x": "more.safetensors"}
    )
    with pytest.raises(CheckpointError, match="has tensors that another file of the folder has too"):
        _ = ModelFolder(tmp_path / "model").tensors


def test_whole_model_beside_an_index_of_others(tmp_path):
    """Transformers reads model.safetensors; an index beside it may be of an earlier model, or that file be stale."""
    tensors, places = sharded(tmp_path / "model")
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has model\.safetensors and .*index\.json, which names other"):
        ModelFolder(tmp_path / "model")
    (tmp_path / "model/model-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="remove the model that is not wanted"):
        ModelFolder(tmp_path / "model")
    (tmp_path / "model/model-1.safetensors").unlink()
    base = ModelFolder(tmp_path / "model")
    assert [*base.files] == [tmp_path / "model/model.safetensors"] and base.tensors.keys() == tensors.keys()
    write_index(tmp_path / "model", dict.fromkeys(tensors, "model.safetensors"))
    assert ModelFolder(tmp_path / "model").tensors.keys() == tensors.keys()


def test_config_names_the_files_of_the_weights(tmp_path):
    """By transformers_weights, beside files with the usual names."""
    tensors, places = sharded(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())

    def read(named):
        (tmp_path / "model/config.json").write_text(json.dumps(config | {"transformers_weights": named}))
        base = ModelFolder(tmp_path / "model")
        return [file.name for file in base.files], base.tensors["model.norm.weight"].read()

    save_file({n: t * 2 for n, t in tensors.items()}, tmp_path / "model/double.safetensors")
    files, value = read("double.safetensors")
    assert files == ["double.safetensors"] and torch.equal(value, 2 * tensors["model.norm.weight"])
    index = tmp_path / "model/double.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "double.safetensors")}))
    assert read(index.name)[0] == ["double.safetensors"]
    files, value = read("model.safetensors.index.json")
    assert files == sorted({*places.values()}) and torch.equal(value, tensors["model.norm.weight"])
    for named, message in (
        ("absent.safetensors.index.json", r"lacks absent\.safetensors\.index\.json"),
        ("double.bin", "no safetensors file or index"),
        ("../double.safetensors", "no name of a file"),
        ("absent.safetensors", r"has no model\.safetensors and no index"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read(named)


@pytest.mark.parametrize(
    ("gate", "layout", "text"),
    [
        (
            "noisy",
            "mixtral",
            r"gate has gate\.w_gate, gate\.w_noise, .* needs gate\.gate\.weight: .*gate='softmax'",
        ),
        (
            "softmax",
            "gemma4_text",
            "needs gate.input_scale, gate.expert_scale: build the layer with gate='normed'",
        ),
    ],
)
@pytest.mark.parametrize("bare", [False, True])
def test_gates_with_other_tensors_are_refused_by_name(gate, layout, text, bare):
    layer = FMoETransformerMLP(E, D, H, activation="swiglu", bias=False, gate=gate)
    with pytest.raises(CheckpointError, match=text):
        to_huggingface(layer.state_dict() if bare else layer, layout)
