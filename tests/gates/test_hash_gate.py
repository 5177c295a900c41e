"""HashGate: choices from a table of the vocabulary, weights from the scores; DeepSeek-V4's first layers."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import fmoe_ext
from fmoe_ext import FMoETransformerMLP, HashGate, token_ids, valid_tokens
from fmoe_ext.testing import run_distributed

V, D, E, K = 50, 8, 8, 3


def make_ids(shape=(4, 6), seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def make_x(ids):
    """Another vector at each place, in float64."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*ids.shape, D, generator=generator, dtype=torch.float64)


def make_layer(num_expert=E, world_size=1, **options):
    torch.manual_seed(0)
    gate = partial(HashGate, vocab_size=V, scale=1.5)
    return FMoETransformerMLP(
        num_expert, D, 2 * D, world_size=world_size, top_k=K, gate=gate, activation="swiglu", **options
    ).double()


def step(layer, ids, x, call=None):
    x = x.clone().requires_grad_()
    with token_ids(ids):
        y = (call or layer)(x)
    y.square().sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_choices_are_the_tables_and_weights_the_scores(score, normalize):
    gate = HashGate(D, E, 1, K, vocab_size=V, score=score, normalize=normalize, scale=2.0).double()
    ids = make_ids((20,))
    x = make_x(ids)
    with token_ids(ids):
        topk_idx, weights = gate(x)
    assert torch.equal(topk_idx, gate.expert_of_id[ids])
    assert all(len(set(row)) == K for row in topk_idx.tolist())
    logits = gate.gate(x)
    scores = {
        "sqrtsoftplus": torch.nn.functional.softplus(logits).sqrt(),
        "sigmoid": logits.sigmoid(),
        "softmax": logits.softmax(-1),
    }[score].gather(1, topk_idx)
    expected = 2.0 * (scores / scores.sum(1, keepdim=True) if normalize else scores)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def test_equals_the_hash_router_of_deepseek_v4():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(
        hidden_size=D, num_local_experts=E, num_experts_per_tok=K, vocab_size=V, routed_scaling_factor=1.5
    )
    router = transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4HashRouter(config).double()
    torch.nn.init.normal_(router.weight)
    router.tid2eid.copy_(torch.rand(V, E).topk(K).indices)
    gate = HashGate(D, E, 1, K, gate_bias=False, vocab_size=V, scale=config.routed_scaling_factor).double()
    gate.gate.weight.data.copy_(router.weight)
    gate.load_table(router.tid2eid)
    ids = make_ids()
    x = make_x(ids).flatten(0, 1)
    _, their_weights, their_choices = router(x, ids)
    with token_ids(ids):
        choices, weights = gate(x)
    assert torch.equal(choices, their_choices)
    torch.testing.assert_close(weights, their_weights, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(weights)
    (ours,) = torch.autograd.grad(weights, gate.gate.weight, grad)
    (theirs,) = torch.autograd.grad(their_weights, router.weight, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_padding_is_taken_out_of_the_ids():
    layer, ids = make_layer(), make_ids()
    x, mask = make_x(ids), torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = mask[3, 2:] = False
    with token_ids(ids), valid_tokens(mask):
        padded = layer(x)
    with token_ids(ids[mask]):
        alone = layer(x[mask])
    assert torch.equal(padded[mask], alone)
    assert not padded[~mask].any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_after_the_block_has_the_same_ids(reentrant):
    layer, ids = make_layer(), make_ids()
    x = make_x(ids)
    plain = step(layer, ids, x)
    layer.zero_grad()
    again = step(layer, ids, x, lambda x: checkpoint(layer, x, use_reentrant=reentrant))
    for a, b in ((plain[0], again[0]), (plain[1], again[1]), *((plain[2][n], again[2][n]) for n in plain[2])):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def on_ranks(state):
    rank, size = dist.get_rank(), dist.get_world_size()
    layer, ids = make_layer(E // size, size), make_ids()
    own = {n: t.chunk(size)[rank] if n.startswith("experts.") else t for n, t in state.items()}
    layer.load_state_dict(own)
    y, gx, grads = step(layer, ids.chunk(size)[rank], make_x(ids).chunk(size)[rank])
    return y, gx, grads["experts.htoh4.weight"]


@pytest.mark.cpu("its tensors are on the CPU")
def test_experts_on_two_ranks_equal_one_process():
    layer, ids = make_layer(), make_ids()
    y, gx, grads = step(layer, ids, make_x(ids))
    for rank, (our_y, our_gx, our_w) in enumerate(run_distributed(on_ranks, 2, layer.state_dict())):
        torch.testing.assert_close(our_y, y.chunk(2)[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(our_gx, gx.chunk(2)[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            our_w, grads["experts.htoh4.weight"].chunk(2)[rank], rtol=1e-12, atol=1e-12
        )


def test_table_is_saved_and_drawn_anew_after_meta():
    gate = HashGate(D, E, 1, K, vocab_size=V)
    gate.load_table(torch.arange(V)[:, None].add(torch.arange(K)) % E)
    other = HashGate(D, E, 1, K, vocab_size=V)
    other.load_state_dict(gate.state_dict())
    assert torch.equal(other.expert_of_id[9], torch.tensor([1, 2, 3]))
    with torch.device("meta"):
        empty = HashGate(D, E, 1, K, vocab_size=V)
    empty = empty.to_empty(device="cpu")
    empty.expert_of_id.fill_(-1)
    empty.reset_parameters()
    assert empty.expert_of_id.min() >= 0 and empty.expert_of_id.max() < E
    assert len(empty.expert_of_id[:, 0].unique()) > 1


@pytest.mark.cpu("its tensors are on the CPU")
def test_misuse_is_refused_by_name():
    layer, ids = make_layer(), make_ids()
    x = make_x(ids)
    with pytest.raises(ValueError, match=r"call the model inside fmoe_ext\.token_ids"):
        layer(x)
    with (
        pytest.raises(ValueError, match="token_ids or the packed sequences have 12 entries"),
        token_ids(ids[:2]),
    ):
        layer(x)
    with pytest.raises(TypeError, match=r"ids must be integers, but got torch\.float64"), token_ids(x):
        pass
    with pytest.raises(IndexError), token_ids(ids - V):
        layer(x)
    with pytest.raises(ValueError, match="takes neither a balance_loss nor num_groups"):
        HashGate(D, E, 1, K, vocab_size=V, balance_loss="global")
    with pytest.raises(ValueError, match="score must be one of"):
        HashGate(D, E, 1, K, vocab_size=V, score="relu")
    with pytest.raises(ValueError, match=r"the table must be \[50, 3\]"):
        layer.gate.load_table(torch.zeros(V, K + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="0 to 7"):
        layer.gate.load_table(torch.full((V, K), E))


def test_export_refuses_the_table():
    with pytest.raises(fmoe_ext.checkpoint.CheckpointError, match=r"gate\.expert_of_id has no place"):
        fmoe_ext.checkpoint.to_huggingface(make_layer(bias=False, gate_bias=False), "qwen3_moe")
