"""Transformers' MoE models with their experts on two ranks, against one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext import huggingface
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_
from fmoe_ext.ep.shadowing import update_shadows
from fmoe_ext.planning.placement import rebalance
from tests.huggingface.huggingface_models import experts_of, make_ids, make_model

transformers = pytest.importorskip("transformers")

MODELS = [
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
]
WORLD = 2
# its router computes in float32, where the products of a batch's rows depend on their number
ROUNDS_TO_FLOAT32 = ("DeepseekV3ForCausalLM",)


def is_of_experts(name):
    return ".experts." in name and "shared" not in name


def own_ids(rank):
    return make_ids(batch=4).chunk(WORLD)[rank]


def spread(architecture, **options):
    model = make_model(architecture, dtype=torch.float64)
    return huggingface.expert_parallel(model, **options)


def loss_of(model, ids):
    """In float64; that of Transformers is computed in float32."""
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(architecture, checkpointing):
    """A rank's step, in DistributedGroupedDataParallel -> loss, gradients, norm, experts here."""
    model = spread(architecture)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    wrapped = DistributedGroupedDataParallel(model, auto_allreduce=True)
    loss = loss_of(wrapped, own_ids(dist.get_rank()))
    loss.backward()
    norm = clip_grad_norm_(wrapped, 1e9)
    return (
        loss.item(),
        gradients_of(model),
        norm.item(),
        [len(experts.down_proj) for experts in experts_of(model)],
    )


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_training_equals_one_process(architecture, checkpointing, pool):
    whole = make_model(architecture, dtype=torch.float64)
    parts = make_ids(batch=4).chunk(WORLD if architecture in ROUNDS_TO_FLOAT32 else 1)
    loss = torch.stack([loss_of(whole, part) for part in parts]).mean()
    loss.backward()
    gradients = gradients_of(whole)
    norm = torch.stack([grad.norm() for grad in gradients.values()]).norm()
    results = pool.run(train, architecture, checkpointing, timeout=600.0)
    assert sum(result[0] for result in results) / WORLD == pytest.approx(loss.item(), rel=1e-12)
    for rank, (_, ours, own_norm, num_here) in enumerate(results):
        assert set(num_here) == {len(experts_of(whole)[0].down_proj) // WORLD}
        assert own_norm == pytest.approx(norm.item(), rel=1e-12)
        assert ours.keys() == gradients.keys()
        for name, expected in gradients.items():
            part = expected.chunk(WORLD)[rank] if is_of_experts(name) else expected
            assert (ours[name] - part).norm() <= 1e-12 * expected.norm(), name


def generate_and_save(architecture, folder):
    """Prompts of different lengths end at different times -> this rank's text."""
    rank = dist.get_rank()
    model = spread(architecture).eval()
    # as Seq2SeqTrainer calls it: a rank must not leave whose experts another one needs
    options = {"do_sample": False, "synced_gpus": False}
    text = model.generate(own_ids(rank), max_new_tokens=3 + 3 * rank, **options)
    model.save_pretrained(folder)
    assert rebalance(model) == 0 and update_shadows(model) == {}  # experts of FMoE only
    return text


@pytest.mark.parametrize("architecture", MODELS)
def test_generate_save_and_load_on_one(architecture, pool, tmp_path):
    whole = make_model(architecture, dtype=torch.float64).eval()
    texts = pool.run(generate_and_save, architecture, str(tmp_path), timeout=600.0)
    for rank, text in enumerate(texts):
        expected = whole.generate(own_ids(rank), max_new_tokens=3 + 3 * rank, do_sample=False)
        assert torch.equal(text, expected)
    loaded = type(whole).from_pretrained(tmp_path, dtype=torch.float64)
    saved = loaded.state_dict()
    assert saved.keys() == whole.state_dict().keys()
    for name, expected in whole.state_dict().items():
        assert torch.equal(saved[name], expected), name


def save_over_a_file(file):
    with pytest.raises(CheckpointError) as caught:
        spread("MixtralForCausalLM").save_pretrained(file)
    return str(caught.value)


def test_failed_save_ends_on_every_rank(pool, tmp_path):
    (tmp_path / "file").touch()
    texts = pool.run(save_over_a_file, str(tmp_path / "file"), timeout=600.0)
    assert texts[0] == texts[1] and texts[0].startswith(f"writing {tmp_path}/file: ")


def save_without_experts(folder):
    model = spread("MixtralForCausalLM")
    state = {name: p for name, p in model.state_dict().items() if dist.get_rank() or not is_of_experts(name)}
    with pytest.raises(CheckpointError) as caught:
        model.save_pretrained(folder, state_dict=state)
    return str(caught.value)


def test_state_dict_that_lacks_experts_on_a_rank_is_refused_on_all(pool, tmp_path):
    texts = pool.run(save_without_experts, str(tmp_path / "out"), timeout=600.0)
    assert texts[0] == texts[1]
    assert "rank 0: state_dict lacks model.layers.0.mlp.experts.gate_up_proj and " in texts[0]
    assert not (tmp_path / "out").exists()


def refuse():
    """Provoke each refused case -> the texts of the errors."""
    model = spread("MixtralForCausalLM")
    texts = []
    for mistake in (
        lambda: huggingface.expert_parallel(model),
        lambda: DistributedDataParallel(model),
        lambda: spread("Qwen2MoeForCausalLM"),
        lambda: huggingface.expert_parallel(torch.nn.Linear(2, 2)),
    ):
        with pytest.raises(ValueError) as caught:
            mistake()
        texts.append(str(caught.value))
    return texts


def test_refusals(pool):
    for again, averaged, uneven, dense in pool.run(refuse, timeout=600.0):
        assert "spread over ranks already" in again
        assert "DistributedDataParallel would overwrite and average them" in averaged
        assert "has 5 experts, which 2 ranks cannot share evenly" in uneven
        assert "Linear has no experts module" in dense
