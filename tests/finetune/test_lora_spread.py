"""PEFT's adapters on experts that are spread over two ranks, against one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fmoe_ext import huggingface, lora
from fmoe_ext.distributed import DistributedGroupedDataParallel
from tests.huggingface.huggingface_models import make_ids, make_model

peft = pytest.importorskip("peft")

WORLD, RANK = 2, 4
MODELS = ["Qwen3MoeForCausalLM", "GptOssForCausalLM"]
WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(model, seed=0):
    """The model with adapters on its experts, neither of whose factors is zero."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=RANK, target_modules=[], target_parameters=WEIGHTS, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def whole_model(architecture):
    return lora.fuse(adapted(huggingface.use(make_model(architecture, dtype=torch.float64))))


def loss_of(model, ids):
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def own_ids():
    return make_ids(batch=4).chunk(WORLD)[dist.get_rank()]


def factors(model):
    """{name: factor with the experts in front} of all adapters, and of their gradients."""
    found = {}
    for name, p in model.named_parameters():
        if ".lora_A." in name:
            found[name] = [t.unflatten(0, (-1, RANK)) for t in (p.detach(), p.grad)]
        elif ".lora_B." in name:
            found[name] = [t.unflatten(1, (RANK, -1)).movedim(2, 0) for t in (p.detach(), p.grad)]
    return found


def train_spread(architecture, folder):
    """A step of a model whose adapters came before it was spread -> loss, factors; its files."""
    model = huggingface.expert_parallel(whole_model(architecture))
    wrapped = DistributedGroupedDataParallel(model, auto_allreduce=True)
    loss = loss_of(wrapped, own_ids())
    loss.backward()
    model.save_pretrained(f"{folder}/adapters")
    trained = factors(model)
    model.merge_and_unload().save_pretrained(f"{folder}/merged")
    return loss.item(), trained


@pytest.mark.parametrize("architecture", MODELS)
def test_spread_model_trains_and_saves_as_one_process(architecture, pool, tmp_path):
    whole = whole_model(architecture)
    loss = loss_of(whole, make_ids(batch=4))
    loss.backward()
    expected = factors(whole)
    results = pool.run(train_spread, architecture, str(tmp_path), timeout=600.0)
    assert sum(loss for loss, _ in results) / WORLD == pytest.approx(loss.item(), rel=1e-12)
    for rank, (_, ours) in enumerate(results):
        assert ours.keys() == expected.keys()
        for name, (value, grad) in ours.items():
            assert torch.equal(value, expected[name][0].chunk(WORLD)[rank]), name
            whole_grad = expected[name][1]
            assert (grad - whole_grad.chunk(WORLD)[rank]).norm() <= 1e-12 * whole_grad.norm(), name
    saved = peft.load_peft_weights(str(tmp_path / "adapters"), device="cpu")
    named = peft.get_peft_model_state_dict(whole)
    assert saved.keys() == named.keys()
    assert all(torch.equal(saved[name], value) for name, value in named.items())
    merged = whole.merge_and_unload()
    loaded = type(merged).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-12, atol=1e-14)


def adapt_spread(architecture, folder):
    """A model that was spread first, each rank with adapters of its own -> its logits; its files."""
    model = huggingface.expert_parallel(make_model(architecture, dtype=torch.float64))
    model = adapted(model, seed=dist.get_rank())
    with pytest.raises(ValueError, match=r"call fmoe_ext\.lora\.fuse\(model\) before wrapping it"):
        DistributedGroupedDataParallel(model)
    wrapped = DistributedGroupedDataParallel(lora.fuse(model), auto_allreduce=True)
    tags = {p.dp_comm for name, p in model.named_parameters() if "lora_" in name}
    model.save_pretrained(folder)
    loss_of(wrapped, own_ids()).backward()
    return model(input_ids=own_ids()).logits.detach(), tags, factors(model)


@pytest.mark.parametrize("architecture", MODELS)
def test_adapters_of_a_spread_model_are_saved_from_all_ranks(architecture, pool, tmp_path):
    results = pool.run(adapt_spread, architecture, str(tmp_path), timeout=600.0)
    base = huggingface.use(make_model(architecture, dtype=torch.float64))
    loaded = lora.fuse(peft.PeftModel.from_pretrained(base, tmp_path))
    for ids, (logits, tags, _) in zip(make_ids(batch=4).chunk(WORLD), results, strict=True):
        assert tags == {"none"}
        assert (loaded(input_ids=ids).logits - logits).abs().max() <= 1e-10 * logits.abs().max()
    first, second = (factors for _, _, factors in results)
    assert all(not torch.equal(first[name][1], second[name][1]) for name in first), "gradients were averaged"
