"""New tokens of a stream whose attention has packed projections, and the cache that grows in place."""

import copy
import functools
import threading

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from fmoe_ext.adapters import Lora, given, take, waiting
from fmoe_ext.finetune.streaming import decoding, experts
from fmoe_ext.finetune.streaming.packed_linear import PackedLinear
from fmoe_ext.finetune.streaming.token_attention import SPARE, append
from tests.finetune.streamed_models import WIDE, resident, save, streamed, write_gguf
from tests.finetune.test_stream import Calls
from tests.finetune.test_stream_packed import error
from tests.huggingface import moe_architectures
from tests.huggingface.huggingface_models import make_ids
from tests.huggingface.moe_architectures import tiny_model

LAYERS = 2


def packed_stream(tmp_path, **options):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=LAYERS, **WIDE)
    return streamed(write_gguf(folder, "q8_0", "q4_k")[0], **options)


def logits_of_token(model, batch=1):
    """Logits of a new token after a prompt, and the calls of operators that it took."""
    with torch.no_grad():
        past = model(make_ids(batch, 5), use_cache=True).past_key_values
        with Calls() as calls:
            return model(
                make_ids(batch, 1), past_key_values=past, use_cache=True
            ).logits.double(), calls.counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_new_token_with_packed_attention_is_as_exact(tmp_path, dtype, batch):
    model = packed_stream(tmp_path, dtype=dtype)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module.register_forward_hook(lambda *_: None)  # a module with a hook is called as ever
    found, calls = logits_of_token(model, batch)
    expected, usual = logits_of_token(plain, batch)
    is_half = dtype == torch.bfloat16
    assert calls["_token_attention" if is_half else "_attention_inputs"] == LAYERS and calls["_rotate"] == 0
    assert calls["_token_experts"] == (LAYERS if is_half and batch == 1 else 0)
    assert usual.keys().isdisjoint(("_token_attention", "_token_experts", "_attention_inputs"))
    if is_half:
        assert torch.equal(found, expected)
    assert error(found, expected) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    "path, attention, experts",
    [
        ("self_attn.k_proj", 1, 2),
        ("self_attn.o_proj", 1, 2),
        ("self_attn", 1, 2),
        ("input_layernorm", 1, 2),
        ("mlp", 2, 1),
        ("mlp.gate", 2, 1),
        ("mlp.experts", 2, 1),
        ("post_attention_layernorm", 2, 1),
    ],
)
def test_hook_of_a_module_is_called(tmp_path, path, attention, experts):
    """attention, experts: layers whose half is still one operator; a layer without the first is called as ever."""
    model, called = packed_stream(tmp_path, dtype=torch.bfloat16), []
    module = model.model.layers[1].get_submodule(path)
    assert type(module) is PackedLinear or "proj" not in path
    module.register_forward_hook(lambda *_: called.append(1))
    _, calls = logits_of_token(model)
    assert len(called) == 2 and calls["_token_attention"] == attention
    assert calls["_token_experts"] == min(attention, experts)


@pytest.mark.parametrize("path", ["self_attn", "mlp.gate", "input_layernorm"])
def test_module_that_is_replaced_is_called(tmp_path, path):
    model, called = packed_stream(tmp_path, dtype=torch.bfloat16), []
    logits_of_token(model)

    class Watched(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **options):
            called.append(1)
            return self.inner(*args, **options)

    parent, _, name = path.rpartition(".")
    holder = model.model.layers[1].get_submodule(parent)
    setattr(holder, name, Watched(getattr(holder, name)))
    logits_of_token(model)
    assert len(called) == 2


def test_experts_of_floats_are_called(tmp_path, monkeypatch):
    model = packed_stream(tmp_path, dtype=torch.bfloat16)
    expected, _ = logits_of_token(model)
    floats = torch.zeros(6, 2, 2), torch.zeros(6, 2, 2)
    monkeypatch.setattr(model.model.layers[1].mlp.experts.streamed, "for_few", lambda *_: floats)
    found, calls = logits_of_token(model)
    assert calls["_token_experts"] == LAYERS - 1 and torch.equal(found, expected)


def test_weight_that_is_replaced_is_used(tmp_path):
    model = packed_stream(tmp_path, dtype=torch.bfloat16)
    before, _ = logits_of_token(model)
    layer = model.model.layers[1]
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm):
        norm.weight = torch.nn.Parameter(2 * norm.weight.detach(), requires_grad=False)
        found, _ = logits_of_token(model)
        assert not torch.equal(found, before)
        before = found


def test_hook_of_all_modules_is_called_by_a_copy_too(tmp_path):
    model, called = packed_stream(tmp_path, dtype=torch.bfloat16), []
    assert logits_of_token(model)[1]["_token_attention"] == LAYERS
    copied = copy.deepcopy(model)
    watch = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        for one in (model, copied):
            assert "_token_attention" not in logits_of_token(one)[1]
            assert one.model.layers[1].self_attn.k_proj in called
    finally:
        watch.remove()
    assert logits_of_token(copied)[1]["_token_attention"] == LAYERS


def test_decorators_of_an_attention_stay_around_ours(tmp_path, monkeypatch):
    """Transformers 5.24 renames an argument by one."""
    theirs, called = Qwen3MoeAttention.forward, []

    @functools.wraps(theirs)
    def decorated(*args, **kwargs):
        called.append(1)
        return theirs(*args, **kwargs)

    monkeypatch.setattr(Qwen3MoeAttention, "forward", decorated)
    decoding._derived.cache_clear()
    _, calls = logits_of_token(packed_stream(tmp_path, dtype=torch.bfloat16))
    decoding._derived.cache_clear()
    assert calls["_attention_inputs"] == LAYERS and len(called) == 2 * LAYERS  # a prompt and a token


def test_attention_of_transformers_can_be_chosen(tmp_path):
    model = packed_stream(tmp_path, dtype=torch.bfloat16)
    model.set_attn_implementation("sdpa")
    calls = logits_of_token(model)[1]
    assert calls["_attention_inputs"] == calls["_token_attention"] == 0


@pytest.mark.parametrize("architecture", ["AXK2", "DeepseekV32", "GlmMoeDsa", "HYV4"])
def test_sparse_attention_keeps_its_choice_of_tokens(architecture, tmp_path, monkeypatch):
    """Its code masks the other tokens where the attention's name is "sdpa" or "eager" alone."""
    changed = moe_architectures.CHANGES.get(f"{architecture}Config", {})
    ids = make_ids()
    logits = []
    for topk in (ids.shape[1], 2):
        monkeypatch.setitem(
            moe_architectures.CHANGES, f"{architecture}Config", {**changed, "index_topk": topk}
        )
        tiny_model(f"{architecture}ForCausalLM").save_pretrained(tmp_path)
        with torch.no_grad():
            logits.append(resident(tmp_path)(ids).logits)
            torch.testing.assert_close(streamed(tmp_path)(ids).logits, logits[-1], rtol=1e-9, atol=1e-9)
    assert (logits[0] - logits[1]).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_of_new_tokens_are_as_exact(tmp_path, dtype):
    rotary = packed_stream(tmp_path, dtype=dtype).model.rotary_emb
    positions = torch.tensor([[0], [7], [4095]])
    given = torch.zeros(3, 1, 8, dtype=dtype), positions
    with torch.no_grad():
        found = rotary(*given)
    expected = rotary(*given)  # with gradients: as ever
    angles = (positions[..., None].float() * rotary.inv_freq).double().repeat(1, 1, 2)
    for one, other, exact in zip(found, expected, (angles.cos(), angles.sin()), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == dtype
        assert (one - exact).abs().max() <= (other - exact).abs().max() + 1e-9


def test_whole_slice_of_the_layers_is_no_new_list(tmp_path):
    layers = packed_stream(tmp_path, dtype=torch.bfloat16).model.layers
    assert layers[:LAYERS] is layers and layers[:] is layers
    assert list(layers[:1]) == [layers[0]] and list(layers[::-1]) == [layers[1], layers[0]]


@torch.no_grad()
def test_kept_positions_are_those_of_the_token(tmp_path):
    """Positions of one token come from a table, those of several are computed: the bits are the same."""
    rotary, x = packed_stream(tmp_path, dtype=torch.bfloat16).model.rotary_emb, torch.zeros(1, 1, 8)
    for frequencies in (rotary.inv_freq, rotary.inv_freq * 2):
        rotary.inv_freq = frequencies
        for dtype in (torch.bfloat16, torch.float32):
            for at in (0, 1, 63, 64, 5, 4095):
                found = rotary(x.to(dtype), torch.tensor([[at]]))
                several = rotary(x.to(dtype), torch.tensor([[at], [at + 1]]))
                assert all(torch.equal(f, s[:1]) for f, s in zip(found, several, strict=True))
        rotary.inv_freq.mul_(3)
        assert torch.equal(rotary(x, torch.tensor([[9]]))[0], rotary(x, torch.tensor([[9], [9]]))[0][:1])


def token(seed, batch=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, 3, 1, 8, generator=generator)


def grown(length, batch=2):
    """(a cache that append() made longer, the same cache by its own update)."""
    caches = DynamicCache(), DynamicCache()
    for cache in caches:
        cache.update(*token(0, batch).expand(-1, -1, -1, 4, -1).clone(), 0)
    with torch.no_grad():
        for seed in range(length):
            append(caches[0], *token(seed, batch), 0)
            caches[1].update(*token(seed, batch), 0)
    return caches


def assert_same(found, expected):
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@torch.no_grad()
def test_cache_grows_in_place():
    found, expected = grown(2)
    address = found.layers[0].keys.data_ptr()
    for seed in range(SPARE + 5):
        before = found.layers[0].keys
        values = before.clone()
        append(found, *token(seed), 0), expected.update(*token(seed), 0)
        assert torch.equal(before, values)
        assert (found.layers[0].keys.data_ptr() == address) == (seed < SPARE - 2)
    assert_same(found, expected)


CHANGES = {
    "crop": lambda cache: cache.crop(-2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "reset": lambda cache: cache.reset(),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_cache_that_is_changed_grows_on(change):
    found, expected = grown(3)
    before = found.layers[0].keys
    values = before.clone()
    for cache in (found, expected):
        CHANGES[change](cache)
    batch = 1 if change == "select" else 2
    for seed in (7, 8):
        append(found, *token(seed, batch), 0), expected.update(*token(seed, batch), 0)
    assert_same(found, expected)
    assert torch.equal(before, values)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_a_cache_grow_apart(copied):
    found, expected = grown(3)
    others = copied(found), copied(expected)
    for cache, other in zip((found, expected), others, strict=True):
        other.layers = [copied(layer) for layer in cache.layers]
    for seed in (7, 8):
        for cache, by in ((found, append), (expected, DynamicCache.update)):
            by(cache, *token(seed), 0)
        for cache, by in zip(others, (append, DynamicCache.update), strict=True):
            by(cache, *token(seed + 10), 0)
    assert_same(found, expected)
    assert_same(others[0], others[1])


def test_cache_of_inference_mode_grows_outside_of_it():
    with torch.inference_mode():
        found, expected = grown(3)
    with torch.no_grad():
        append(found, *token(7), 0), expected.update(*token(7), 0)
        assert_same(found, expected)


def test_cache_with_gradients_is_not_written_to():
    found, _ = grown(1)
    key, value = token(7).requires_grad_()
    keys, _ = append(found, key, value, 0)
    assert keys.grad_fn is not None


def test_experts_of_a_token_stay_while_another_thread_reads_layers(tmp_path, monkeypatch):
    """A server's threads share a model: one computes with chosen experts while a prompt of another needs the memory."""
    folder = save(tmp_path / "model", dtype=torch.float32, num_hidden_layers=2)
    model, whole = streamed(folder, 1), resident(folder)
    token, prompt = make_ids(1, 1), make_ids(2, 12)
    is_computing, is_done = threading.Event(), threading.Event()
    compute_few = experts.compute_few

    def slowly(*given):
        is_computing.set()
        is_done.wait(0.3)  # what the other thread has to wait for
        return compute_few(*given)

    def read_layers():
        is_computing.wait()
        with torch.no_grad():
            found.append(model(prompt).logits)
        is_done.set()

    found = []
    other = threading.Thread(target=read_layers)
    monkeypatch.setattr(experts, "compute_few", slowly)
    other.start()
    with torch.no_grad():
        torch.testing.assert_close(model(token).logits, whole(token).logits)
        other.join()
        torch.testing.assert_close(found[0], whole(prompt).logits)
    assert model.expert_stream.statistics.misses > 0


def test_adapters_wait_for_the_calls_of_their_own_thread():
    module, lora = torch.nn.Linear(2, 2), Lora(torch.ones(1, 1, 2), torch.ones(1, 2, 1))
    taken, barrier = [], threading.Barrier(2)

    def call():
        with given(module, "weight", lora):
            barrier.wait()
            taken.append(take(module))
            barrier.wait()

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [{"weight": lora}] * 2 and not waiting(module)
