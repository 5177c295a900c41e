"""experts_implementation="fmoe" under Trainer, accelerate and Transformers' expert parallelism."""

import contextlib
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from fmoe_ext import fmoefy, huggingface
from tests.huggingface.huggingface_models import make_ids, make_model, step

transformers = pytest.importorskip("transformers")

STEPS = 4


def train_with_trainer(implementation, folder):
    pytest.importorskip("accelerate")
    model = make_model("Qwen3MoeForCausalLM", implementation, torch.float64)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    ids = make_ids(batch=2 * STEPS)
    examples = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_accelerate(implementation, folder):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model("GptOssForCausalLM", implementation, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for ids in make_ids(batch=2 * STEPS).split(2):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("given", [False, True])
def test_warning_where_a_resume_may_lose_experts(given):
    """Said at the first training forward of a model that was never given to use(), and only there."""
    huggingface.register()
    model = make_model("Qwen3MoeForCausalLM", "fmoe", torch.float32)
    if given:
        huggingface.use(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.eval()(make_ids())
        model.train().requires_grad_(False)(make_ids())
        assert not caught
        for _ in range(2):
            model.requires_grad_(True)(make_ids())
    layers = sum(hasattr(module, "is_transposed") for module in model.modules())
    assert len(caught) == (0 if given else layers)
    assert all("Call huggingface.use(model) once" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("train", [train_with_trainer, train_with_accelerate])
def test_losses_equal_eager(train, tmp_path):
    huggingface.register()
    expected, got = train("eager", tmp_path), train("fmoe", tmp_path)
    assert len(expected) == STEPS and len(set(expected)) == STEPS
    assert got == pytest.approx(expected, rel=1e-8)


def load_expert_parallel(folder, architecture, options):
    """One rank's step on a model of which it loaded its own experts -> logits, loss, gradients, experts here."""
    huggingface.register()
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    config = transformers.distributed.DistributedConfig(tp_size=2, ep_size=2, **options)
    model = getattr(transformers, architecture).from_pretrained(
        folder, experts_implementation="fmoe", dtype=torch.float64, distributed_config=config
    )
    logits, loss, gradients = step(model.eval(), make_ids())
    gradients = {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in gradients.items()}
    num_here = [p.to_local().shape[0] for k, p in model.named_parameters() if k.endswith("gate_up_proj")]
    return logits, loss, gradients, num_here


IS_MASKED_BY_A_ROUTER = Version(transformers.__version__) < Version("5.24")
MASKED = {"model.layers.*.mlp.experts": "moe_tp_experts"}
# {how tokens reach the experts: (options of DistributedConfig, the router's rule of a plan)}
if IS_MASKED_BY_A_ROUTER:
    WAYS = {"exchanged": {"tp_plan": {}}, "masked": {"tp_plan": {}, "ep_plan": MASKED}}
else:  # experts alone cannot be spread: dense layers are in tensor parallelism too
    WAYS = {"exchanged": {"ep_implementation": "all_to_all"}, "masked": {"ep_implementation": "all_reduce"}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("architecture", "router"), [("Qwen3MoeForCausalLM", "gate"), ("GptOssForCausalLM", "router")]
)
def test_expert_parallel_loading(architecture, router, way, pool, tmp_path):
    """Tokens travel to the ranks of their experts, or every rank sees all and skips those of other ranks' experts."""
    options = WAYS[way]
    if "ep_plan" in options:
        options = options | {"ep_plan": {f"model.layers.*.mlp.{router}": "ep_router", **MASKED}}
    make_model(architecture, dtype=torch.float64).save_pretrained(tmp_path)
    whole = getattr(transformers, architecture).from_pretrained(
        tmp_path, experts_implementation="eager", dtype=torch.float64
    )
    logits, loss, gradients = step(whole.eval(), make_ids())
    for result in pool.run(load_expert_parallel, str(tmp_path), architecture, options, timeout=600.0):
        got_logits, got_loss, got_gradients, num_here = result
        assert num_here == [3, 3]  # of 6 in each of 2 layers
        torch.testing.assert_close(got_logits, logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)
        assert got_gradients.keys() == gradients.keys()
        for name, expected in gradients.items():
            assert (got_gradients[name] - expected).norm() <= 1e-12 * expected.norm(), name


def train_wrapped(folder):
    """The Trainer wraps by itself under torchrun: in DistributedDataParallel, which would average different experts."""
    os.environ.update(
        {name: str(value) for name, value in (("LOCAL_RANK", dist.get_rank()), ("RANK", dist.get_rank()))},
        WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(4)]
    for spread in (True, False):
        arguments = transformers.TrainingArguments(
            folder, max_steps=1, use_cpu=True, report_to=[], save_strategy="no"
        )
        model = transformers.LlamaForCausalLM(config)
        model = fmoefy(model, num_experts=2, distributed_experts=spread, gate="softmax")
        raises = pytest.raises(ValueError, match=r"experts of layer 'model\.layers\.0\.mlp' differ between")
        with raises if spread else contextlib.nullcontext():
            transformers.Trainer(model, arguments, train_dataset=rows).train()


def test_trainer_of_spread_experts(pool, tmp_path):
    """The last test of the pool, because accelerate keeps the ranks that it finds."""
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    pool.run(train_wrapped, str(tmp_path), world_size=2)
