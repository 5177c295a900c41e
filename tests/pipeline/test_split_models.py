"""split() of whole models: decoders of Transformers, examples/lm, models on the meta device; and where it cuts."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fmoe_ext
from fmoe_ext import balance, checkpoint
from fmoe_ext.gates import BaseGate, total_loss
from fmoe_ext.pipeline import Pipeline, init_groups, split
from fmoe_ext.testing import DistributedError
from tests.pipeline.sleeping import Sleep, sleeping

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "lm")
VOCABULARY, D, ROWS, LENGTH = 11, 8, 6, 4
BALANCE = 0.3


def data():
    generator = torch.Generator().manual_seed(10)
    return tuple(torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))


def decoder(group=None):
    """Qwen3, its MLPs made FMoE layers, head and embedding tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=D,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).double()
    return fmoe_ext.fmoefy(model, num_experts=4, moe_group=group)


def mixtral(group=None):
    """Mixtral with its own experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": D, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=1, num_local_experts=4, sliding_window=None, **sizes
    )
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # the others take no float64
    return MixtralForCausalLM(config).double()


def language_model(group=None):
    sys.path.append(EXAMPLE)
    try:
        from model import LanguageModel, ModelConfig
    finally:
        sys.path.remove(EXAMPLE)
        sys.modules.pop("model", None)
    config = ModelConfig(D, 2, 2, num_experts=4, d_hidden=12, top_k=2, gate="softmax")
    torch.manual_seed(0)
    model = LanguageModel(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


MODELS = {"qwen3": decoder, "mixtral": mixtral, "examples_lm": language_model}


def train(name, schedule="1f1b", stages=2, chunks=2):
    groups = init_groups(2)
    parts = split(MODELS[name](groups.ep), stages, data()[0], by="memory")
    pipeline = Pipeline(parts, chunks=chunks, schedule=schedule, groups=groups, balance_weight=BALANCE)
    loss = pipeline.train_step(*data())
    return loss.item(), {name: p.grad for name, p in pipeline.module.named_parameters()}


def alone(model, chunks=2):
    """(loss, {name: gradient}) of one process that accumulates the same microbatches."""
    tokens, target = data()
    total = 0.0
    for x, y in zip(tokens.tensor_split(chunks), target.tensor_split(chunks), strict=True):
        out = model(x)
        out = getattr(out, "logits", out)
        share = len(y) / len(target)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) * share
        total += loss.item()
        balance_loss = total_loss(model) if any(isinstance(m, BaseGate) for m in model.modules()) else 0
        (loss + BALANCE * share * balance_loss).backward()
    return total, {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def check(results, expected):
    loss, gradients = expected
    seen = set()
    for got, grads in results:
        assert math.isclose(got, loss, rel_tol=1e-12)
        for name, grad in grads.items():
            scale = gradients[name].abs().max().clamp(min=1e-3)
            assert (grad - gradients[name]).abs().max() <= 1e-12 * scale, name
            seen.add(name)
    assert seen | {"lm_head.weight"} >= set(gradients)


@pytest.mark.parametrize("name", list(MODELS))
def test_models_equal_one_process(pool, name):
    check(pool.run(train, name, world_size=2), alone(MODELS[name]()))


def test_decoder_in_a_v(pool):
    check(pool.run(train, "qwen3", "dualpipe_v", 4, 4, world_size=2), alone(decoder(), 4))


def fmoefied_over_all_ranks():
    parts = split(decoder(), 2, data()[0], by="memory")
    with pytest.raises(
        ValueError, match=r"model.layers.\d.mlp spans ranks \[0, 1\], but its stage is on ranks"
    ):
        Pipeline(parts)


def test_experts_over_ranks_of_other_stages(pool):
    pool.run(fmoefied_over_all_ranks, world_size=2, timeout=60)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 3}, "attention of other kinds"),
        ({"_attn_implementation": "flash_attention_2"}, "takes no mask of numbers"),
        ({"output_router_logits": True}, "adds its router's loss itself"),
    ],
)
def test_decoders_that_stages_would_not_honour(change, text):
    model = decoder()
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=text):
        split(model, 2, data()[0], by="memory")


def test_empty_microbatches(pool):
    with pytest.raises(DistributedError, match="takes no empty microbatch: the batch was cut into 4"):
        pool.run(train, "qwen3", "dualpipe_v", 4, 2, world_size=2, timeout=60)


def cut_of(stages):
    return [len(stage.layers) for stage in stages]


def test_cut_by_time():
    model = nn.Sequential(*(Sleep(seconds) for seconds in (0.12, 0.01, 0.01, 0.01, 0.01)))
    with sleeping():
        assert cut_of(split(model, 2, torch.randn(2, 3), by="time")) == [1, 4]


def test_cut_by_memory():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 40))
    assert cut_of(split(model, 2, torch.randn(2, 8), by="memory")) == [4, 1]


def by_load():
    """Six equal layers; on two ranks, those of which one rank has all the tokens take as long as two."""

    def expert(_):
        return Sleep(0.06)

    layers = [
        fmoe_ext.FMoE(1, D, world_size=2, top_k=1, expert=expert, gate=fmoe_ext.gates.UniformGate)
        for _ in range(6)
    ]
    model = nn.Sequential(*layers)
    monitor = balance.watch(model)
    model.train()(torch.randn(4, D))
    names = list(monitor.collect()["layers"])
    load = {name: [8, 0] if i < 3 else [4, 4] for i, name in enumerate(names)}
    even = {name: [4, 4] for name in names}
    with sleeping():
        return [cut_of(split(model, 2, torch.randn(4, D), by="load", load=given)) for given in (even, load)]


def test_cut_by_load(pool):
    assert pool.run(by_load, world_size=2) == [[[3, 3], [2, 4]]] * 2


def on_meta(folder):
    with torch.device("meta"):
        model = language_model()
    parts = split(model, 2, data()[0], by="memory")
    assert all(p.is_meta for stage in parts for p in stage.parameters())
    pipeline = Pipeline(parts, chunks=2, balance_weight=BALANCE, init=lambda m: checkpoint.load(folder, m))
    assert sum(p.is_meta for stage in parts for p in stage.parameters()) > 0  # those of the other rank
    loss = pipeline.train_step(*data())
    return loss.item(), {name: p.grad for name, p in pipeline.module.named_parameters()}


def test_model_on_the_meta_device(pool, tmp_path):
    model = language_model()
    checkpoint.save(tmp_path, model)
    check(pool.run(on_meta, tmp_path, world_size=2), alone(model))


def meta_errors():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    parts = split(model, 2, torch.randn(4, 4), by=[2, 2])
    with pytest.raises(ValueError, match=r"the model is on the meta device: pass Pipeline\(init=\)"):
        Pipeline(parts)
    parts = split(model, 2, torch.randn(4, 4), by=[2, 2])
    layer = 2 * dist.get_rank()
    with pytest.raises(ValueError, match=rf"init= gave {layer}.bias no value, nor 5 others"):
        Pipeline(parts, init=lambda module: module.get_submodule(str(layer)).weight.zero_())


def test_init_must_fill_everything(pool):
    pool.run(meta_errors, world_size=2)


def test_tied_parameters_stay_tied_when_they_get_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[0].weight.dp_comm = "world"
    from fmoe_ext.pipeline.materialize import materialize

    materialize([model], [model[0]], torch.device("cpu"))
    assert model[1].weight is model[0].weight and model[0].weight.dp_comm == "world"
    assert model[0].weight.isnan().all() and model[1].bias.is_meta
