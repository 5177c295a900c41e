"""prune() of every architecture of Transformers: the model that Transformers builds with fewer experts."""

import pytest
import torch

from fmoe_ext import huggingface
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.compress import prune
from fmoe_ext.compress.cut import config_with

transformers = pytest.importorskip("transformers")

from tests.huggingface.huggingface_models import make_ids  # noqa: E402
from tests.huggingface.moe_architectures import outcomes, skip_without, tiny_model  # noqa: E402

SHORT = (
    "AriaTextForCausalLM",  # names and order of its own in files
    "DeepseekV4ForCausalLM",  # hash routing
    "Gemma4ForCausalLM",  # a router beside the experts, with a scale of each expert
    "InklingForCausalLM",  # gate and up in turn
    "JambaForCausalLM",  # layers of other kinds
    "MiniMaxM2ForCausalLM",  # a bias outside of the router
    "Qwen3VLMoeForConditionalGeneration",  # transposed stacks, and a tower for images
)
SIZE, NUMBER = 6, 4  # no other dimension of the small models is 6


def tokens():
    return torch.randint(3, 61, (200,), generator=torch.Generator().manual_seed(3))


def cut_by_hand(model, kept, table):
    """Another model with NUMBER experts, of every tensor with a dimension of SIZE its entries `kept`."""
    config = type(model.config).from_dict(config_with(model.config.to_dict(), SIZE, NUMBER))
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith("tid2eid"):
            state[name] = table[name]
        elif name.endswith("gate.weight") and "Inkling" in type(model).__name__:  # a shared expert is behind
            path = f"{name.removesuffix('gate.weight')}experts"
            state[name] = value[[*kept[path], SIZE]]
        elif SIZE in value.shape:
            # from "layers." on: a language model beside a tower has a longer name than in the report
            where = name[name.find("layers.") :]
            beside = {path: path[path.find("layers.") :].rpartition(".")[0] for path in kept}
            path = max(kept, key=lambda path: len(path) if where.startswith(beside[path]) else 0)
            state[name] = value.index_select(list(value.shape).index(SIZE), torch.tensor(kept[path]))
        else:
            state[name] = value
    smaller = type(model)._from_config(config, dtype=model.dtype)
    smaller.load_state_dict(state)
    smaller.config._experts_implementation = "eager"
    return smaller.eval()


def outcome(name, folder):
    try:
        model = tiny_model(name)
        with torch.no_grad():
            model(input_ids=make_ids())
    except Exception as error:  # whatever a class says of sizes that it does not expect
        return f"not tried: {type(error).__name__}"
    if not any(hasattr(module, "is_transposed") for module in model.modules()):
        return "not tried: no experts in the small model"
    model.double()
    for key, value in model.state_dict().items():
        if key.endswith("tid2eid"):  # of zeros otherwise
            value.copy_(torch.rand(value.shape[0], SIZE).argsort(1)[:, : value.shape[1]])
    model.save_pretrained(folder / "model")
    try:
        report = prune(folder / "model", folder / "out", tokens(), experts=NUMBER, seq_len=20)
    except CheckpointError as error:
        return f"refused: {error}"
    kept = {path: layer["kept"] for path, layer in report["layers"].items()}
    # by its class: of some models with images AutoModelForCausalLM knows the language model alone, or nothing
    found = huggingface.use(type(model).from_pretrained(folder / "out", dtype="auto")).eval()
    tables = {n: t for n, t in found.state_dict().items() if n.endswith("tid2eid")}
    expected = cut_by_hand(model, kept, tables)
    with torch.no_grad():
        ours, theirs = (m(input_ids=make_ids())[0] for m in (found, expected))
    rtol, atol = (
        (1e-10, 1e-12) if ours.dtype == torch.float64 else (1e-6, 1e-7)
    )  # some compute in float32 whatever the dtype
    return "equal" if torch.allclose(ours, theirs, rtol=rtol, atol=atol) else "WRONG"


@pytest.mark.parametrize("name", SHORT)
def test_pruned_folder_is_the_model_with_fewer_experts(name, tmp_path):
    skip_without(name)
    assert outcome(name, tmp_path) == "equal"


def test_experts_for_images_are_refused_by_name(tmp_path):
    name = "Ernie4_5_VLMoeForConditionalGeneration"
    skip_without(name)
    found = outcome(name, tmp_path)
    assert found.startswith("refused: ") and "has experts for images" in found
    assert "model.layers.1.mlp.experts.6.gate_proj.weight" in found and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_architecture_is_pruned_or_refused(tmp_path):
    """Nine minutes on a busy core."""
    found = outcomes(outcome, tmp_path)
    assert not {name: text for name, text in found.items() if text == "WRONG"}
    assert sum(text == "equal" for text in found.values()) >= 40


def test_tables_of_experts_name_those_that_stay_once_a_token(tmp_path):
    name = "DeepseekV4ForCausalLM"
    skip_without(name)
    model = tiny_model(name)
    before = {n: t for n, t in model.state_dict().items() if n.endswith("tid2eid")}
    for value in before.values():
        value.copy_(torch.rand(value.shape[0], SIZE).argsort(1)[:, : value.shape[1]])
    model.save_pretrained(tmp_path / "model")
    report = prune(tmp_path / "model", tmp_path / "out", tokens(), experts=NUMBER, seq_len=20)
    after = type(model).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert before
    for key, old in before.items():
        (kept,) = (
            layer["kept"]
            for path, layer in report["layers"].items()
            if path.startswith(key.partition(".gate.")[0])
        )
        new = after[key]
        for row_before, row_after in zip(old.tolist(), new.tolist(), strict=True):
            assert len(set(row_after)) == len(row_after) and max(row_after) < NUMBER
            for one_before, one_after in zip(row_before, row_after, strict=True):
                assert one_before not in kept or kept[one_after] == one_before
