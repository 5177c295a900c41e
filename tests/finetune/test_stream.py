"""fmoe_ext.stream(): a model whose experts stay in files computes as the one in memory."""

import itertools

import pytest
import torch

import fmoe_ext
from fmoe_ext.finetune.streaming.placeholder import PackedWeight
from tests import fake_deepspeed
from tests.finetune.streamed_models import (
    bytes_of_adapters,
    checkpoint_layers,
    resident,
    save,
    streamed,
    train,
    with_adapters,
)
from tests.huggingface.huggingface_models import make_ids, step
from tests.sweeps import rest_is_long

pytest.importorskip("transformers")

ARCHITECTURES = {
    "Qwen3MoeForCausalLM": {},
    "MixtralForCausalLM": {},
    "GptOssForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "OlmoeForCausalLM": {},
    "GraniteMoeForCausalLM": {},
}


def both(folder, num_layers=2, states=4, **options):
    """(resident, streamed) with the same adapters. states: bytes for an adapter, per byte of its weight."""
    plain = with_adapters(resident(folder), **options)
    return plain, with_adapters(streamed(folder, num_layers, states * bytes_of_adapters(plain)), **options)


FEW_KINDS = [(False, torch.bfloat16), (True, torch.float64)]
KINDS_OF_TRAINING = rest_is_long(itertools.product((False, True), (torch.float64, torch.bfloat16)), FEW_KINDS)


@pytest.mark.parametrize(("checkpointing", "dtype"), KINDS_OF_TRAINING)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_equals_the_resident_model(tmp_path, architecture, checkpointing, dtype):
    folder = save(tmp_path, architecture, dtype)
    results = []
    for model in both(folder):
        if checkpointing:
            checkpoint_layers(model)
        model.train()
        results.append(step(model, make_ids()))
    (logits, loss, gradients), (ours, our_loss, our_gradients) = results
    assert torch.equal(ours, logits) and torch.equal(our_loss, loss)
    assert gradients.keys() == our_gradients.keys() and len(gradients) >= 16
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(our_gradients[name], gradient), name


READS = list(itertools.product((2, 3, 5), (None, False, True)))


@pytest.mark.parametrize(
    ("num_layers", "use_reentrant"),
    rest_is_long(READS, [(2, None), (3, False), (3, True), (5, None), (5, True)]),
)
def test_reads_of_a_step(tmp_path, num_layers, use_reentrant):
    plain, model = both(save(tmp_path), num_layers)
    model.train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    stream = model.expert_stream
    step(model, make_ids())
    for num_tokens in (12, 60):
        stream.reset_statistics()
        step(model, make_ids(num_tokens=num_tokens))
        found = stream.statistics
        fewest = 0 if num_layers == 5 else 2 * (5 - num_layers)
        # reentrant checkpoints leave cycles, which hold buffers until they are collected
        assert fewest <= found.layers_read <= (2 * 5 if use_reentrant else fewest)
        assert found.experts_read == 6 * found.layers_read
        assert found.buffer_bytes == num_layers * stream.pool.layer_bytes <= stream.pool.num_bytes


def test_layer_is_read_ahead(tmp_path):
    _, model = both(save(tmp_path), 2)
    model.train()
    seen = []
    whole = model.expert_stream.pool.whole

    def watch(index, **options):
        weights = whole(index, **options)
        slots = model.expert_stream.pool.resident_layers()
        seen.append((index, index + 1 in slots if not options["is_backward"] else index - 1 in slots))
        return weights

    model.expert_stream.pool.whole = watch
    checkpoint_layers(model)
    step(model, make_ids())
    assert [index for index, _ in seen] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    assert all(ahead for index, ahead in seen[:4]) and all(ahead for index, ahead in seen[6:9])


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_generation_equals_the_resident_model(tmp_path, architecture, num_layers):
    plain, model = both(save(tmp_path, architecture), num_layers, states=1)
    options = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        expected = plain.generate(make_ids(1, 5), **options)
        found = model.generate(make_ids(1, 5), **options)
    assert torch.equal(found, expected)
    stream = model.expert_stream
    stats = stream.statistics
    assert stats.buffer_bytes <= stream.pool.num_bytes
    assert (stats.parts_read > 0) == (num_layers == 1)
    if 2 <= num_layers < 5:
        assert stats.hits + stats.misses == 5 * 2 * stats.tokens and stats.tokens == 5
        assert stats.experts_read == 6 * stats.layers_read + stats.misses
        assert stats.hits > 0


def test_generation_reads_chosen_experts_only(tmp_path):
    model = streamed(save(tmp_path), 2)
    stream = model.expert_stream
    read = []
    layers = stream.pool.layers
    spans = type(layers[0]).spans

    def watch(layer, experts, slots, num_slots):
        read.append((layers.index(layer), tuple(experts)))
        return spans(layer, experts, slots, num_slots)

    chosen = []
    pool_chosen = stream.pool.chosen
    stream.pool.chosen = lambda index, experts: (
        chosen.append((index, tuple(experts))),
        pool_chosen(index, experts),
    )[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layers[0]), "spans", watch)
        with torch.no_grad():
            model(make_ids(1, 1))
            model(make_ids(1, 1))
    assert read == chosen[:5]  # the second token is the same, so that all its experts are there


def test_trainer_trains_the_adapters_alone(tmp_path):
    pytest.importorskip("accelerate")
    folder = save(tmp_path / "model", dtype=torch.bfloat16)
    losses, states = [], []
    for model in both(folder):
        losses.append(train(model, tmp_path / "out", max_steps=3)[0])
        model.save_pretrained(tmp_path / "adapter")
        states.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


def test_saved_adapter_is_loaded_again(tmp_path):
    peft = pytest.importorskip("peft")
    folder = save(tmp_path / "model")
    plain, model = both(folder)
    with torch.no_grad():
        expected = model(make_ids()).logits
    model.save_pretrained(tmp_path / "adapter")
    again = fmoe_ext.lora.fuse(
        peft.PeftModel.from_pretrained(
            streamed(folder, 2, 4 * bytes_of_adapters(plain)), tmp_path / "adapter"
        )
    )
    with torch.no_grad():
        assert torch.equal(again(make_ids()).logits, expected)
        with again.disable_adapter():
            assert torch.equal(again(make_ids()).logits, resident(folder)(make_ids()).logits)


def test_budget_is_refused_with_its_arithmetic(tmp_path):
    folder = save(tmp_path)
    with pytest.raises(ValueError, match=r"\(4 experts\).* = [\d,]+"):
        fmoe_ext.stream(folder, 200_000)
    model = with_adapters(streamed(folder, 1))
    model.train()
    with pytest.raises(ValueError, match=r"65,280 \(adapters\).*two moments of Adam.*smaller rank"):
        step(model, make_ids())


def test_graph_that_keeps_all_buffers_is_refused(tmp_path):
    _, model = both(save(tmp_path), 2)
    model.train()
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="gradient_checkpointing"):
        step(model, make_ids())


def test_adapters_that_are_not_fused_are_refused(tmp_path):
    model = with_adapters(streamed(save(tmp_path), 2, 10**6), fuse=False)
    with pytest.raises(RuntimeError, match=r"lora\.fuse"):
        model(make_ids())


def test_values_of_streamed_weights_are_refused(tmp_path):
    model = streamed(save(tmp_path))
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert weight.shape == (6, 48, 32) and weight.dtype == torch.float64 and not weight.requires_grad
    assert model.to("cpu") is model and model.double() is model
    assert model.num_parameters() == resident(tmp_path).num_parameters()
    for broken in (
        lambda: weight + 1,
        lambda: weight[0],
        lambda: weight.clone(),
        lambda: model.float(),
        lambda: weight.requires_grad_(),
        lambda: torch.save(weight, tmp_path / "weight"),
        lambda: torch.save(model, tmp_path / "model"),
        lambda: model.save_pretrained(tmp_path / "again"),
    ):
        with pytest.raises(RuntimeError, match=r"fmoe adapter merge"):
            broken()
    model = streamed(tmp_path)  # float() has changed the other weights before it came to the experts
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="experts_implementation"):
        model(make_ids())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_token_has_the_bits_of_the_model_in_memory(tmp_path, architecture):
    folder = save(tmp_path, architecture, torch.bfloat16)
    found = []
    for model in (resident(folder), streamed(folder)):
        with torch.no_grad():
            past = model(make_ids(2, 5), use_cache=True).past_key_values
            logits = model(make_ids(2, 1), past_key_values=past, use_cache=True).logits
        tokens = model.generate(make_ids(1, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        found.append((logits, tokens, [type(module) for module in model.modules()]))
    plain, ours = found
    assert torch.equal(ours[0], plain[0]) and torch.equal(ours[1], plain[1])
    assert ours[2] == plain[2]  # modules are Transformers' own


@pytest.mark.parametrize(
    "option, message",
    [
        ("torch_compile", "torch.compile does not compile this model"),
        ("bf16_full_eval", r"stream\(\.\.\., dtype="),
    ],
)
def test_options_of_the_trainer_that_change_weights_are_refused(tmp_path, option, message):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = with_adapters(
        streamed(save(tmp_path / "model", dtype=torch.float32, num_hidden_layers=2), 2, 10**6)
    )
    arguments = transformers.TrainingArguments(tmp_path / "out", use_cpu=True, report_to=[], **{option: True})
    data = [{"input_ids": row, "labels": row} for row in make_ids(8, 10)]
    with pytest.raises(RuntimeError, match=message):
        transformers.Trainer(model, arguments, eval_dataset=data).evaluate()


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_deepspeed_is_refused_by_name(tmp_path, dtype):
    model = streamed(save(tmp_path, dtype=torch.float32))
    packed = torch.nn.Module()
    packed.weight = PackedWeight((4, 4), torch.float32)
    one_process = "DeepSpeed: it copies every weight: leave deepspeed= out of .* train in one process"
    with fake_deepspeed.installed() as engine:
        for module in (model, packed):
            with pytest.raises(RuntimeError, match=one_process):
                engine(module, dtype)
        assert model.model.layers[0].mlp.experts.down_proj.data is not None  # without its engine


@pytest.mark.parametrize(
    "text, expected", [("8GiB", 2**33), ("1.5 MB", 1_500_000), (77, 77), ("12", 12), ("2 KiB", 2048)]
)
def test_memory_texts(text, expected):
    from fmoe_ext.memory import bytes_of_text

    assert bytes_of_text(text) == expected


@pytest.mark.parametrize("text", ["8 gigabytes", "GiB", "-1GiB", "", 0, "0", "0 GiB", "0.4"])
def test_memory_text_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match="8GiB"):
        fmoe_ext.stream(tmp_path, text)
