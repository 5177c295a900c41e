"""import_model(folder, mtp_loss=): heads for the tokens after the next train with their model."""

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

transformers = pytest.importorskip("transformers")

from transformers.modeling_layers import MtpModel  # noqa: E402

from tests.formats.test_formats_heads import assert_equal_folders  # noqa: E402
from tests.huggingface.huggingface_models import make_ids  # noqa: E402
from tests.huggingface.moe_architectures import tiny_model  # noqa: E402
from tests.huggingface.moe_heads import add_heads  # noqa: E402

WEIGHT = 0.3


def make_folder(folder, name="Glm4MoeForCausalLM", dtype=torch.float64, heads=1):
    """A folder with heads -> {name: tensor} of them; the second has the copies that published files have."""
    head = add_heads(tiny_model(name, dtype), folder)
    if heads == 2:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        more = {k.replace("layers.2.", "layers.3."): 1.1 * v for k, v in head.items()}
        more["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        more["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors | more, file, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config |= {key: 2 for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in config}
        (folder / "config.json").write_text(json.dumps(config))
        head |= more
    return head


def rms(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def oracle(model, blocks, tensors, ids, labels):
    """The loss of the paper, one sequence and one position after the other; block: Transformers' own, eager."""
    config = model.config
    hidden, losses = model.model(input_ids=ids).last_hidden_state, []
    for k, block in enumerate(blocks, 1):
        begin, n = f"model.layers.{1 + k}.", ids.shape[1] - k - 1
        weight = lambda leaf, begin=begin: tensors[f"{begin}{leaf}.weight"]  # noqa: E731
        e = rms(model.model.embed_tokens(ids[:, k : k + n]), weight("enorm"), config.rms_norm_eps)
        h = rms(hidden[:, :n], weight("hnorm"), config.rms_norm_eps)
        x = torch.cat([e, h], -1) @ weight("eh_proj").T
        rope = model.model.rotary_emb(x, torch.arange(n)[None])
        mask = torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        x = block(x, attention_mask=mask, position_embeddings=rope, position_ids=torch.arange(n)[None])
        hidden = rms(x, weight("shared_head.norm"), config.rms_norm_eps)
        logits = hidden @ model.lm_head.weight.T
        of_tokens = [
            -logits[b, i].log_softmax(-1)[labels[b, i + k + 1]]
            for b in range(len(ids))
            for i in range(n)
            if labels[b, i + k + 1] != -100
        ]
        losses.append(torch.stack(of_tokens).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("count", [1, 2])
def test_loss_and_gradients_are_those_of_the_paper(count, tmp_path):
    head = make_folder(tmp_path / "in", heads=count)
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float64, mtp_loss=WEIGHT).train()
    ids = make_ids(2, 9)
    labels = ids.clone()
    labels[0, :3] = labels[1, 7] = -100
    plain = transformers.Glm4MoeForCausalLM.from_pretrained(
        tmp_path / "in", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).train()
    own = plain(input_ids=ids, labels=labels).loss
    leaves = {name: value.clone().requires_grad_() for name, value in head.items()}
    blocks = []
    for k in range(count):
        block = copy.deepcopy(plain.model.layers[-1])
        begin = f"model.layers.{2 + k}."
        stack = lambda leaf, begin=begin: [  # noqa: E731
            leaves[f"{begin}mlp.experts.{e}.{leaf}_proj.weight"] for e in range(6)
        ]
        values = {n.removeprefix(begin): v for n, v in leaves.items() if n.startswith(begin)}
        state = {
            n: v
            for n, v in values.items()
            if n in dict(block.named_parameters()) | dict(block.named_buffers())
        }
        gate_up = torch.stack([torch.cat(pair) for pair in zip(stack("gate"), stack("up"), strict=True)])
        state |= {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": torch.stack(stack("down"))}
        blocks.append(
            lambda *args, block=block, state=state, **kwargs: torch.func.functional_call(
                block, state, args, kwargs
            )
        )
    extra = oracle(plain, blocks, leaves, ids, labels)
    (own + WEIGHT * extra).backward()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(model.mtp.last_loss, extra.detach())
    torch.testing.assert_close(
        loss.double(), (own + WEIGHT * extra).detach(), rtol=1e-6, atol=0
    )  # own in float32
    E = "model.embed_tokens.weight"
    torch.testing.assert_close(dict(model.named_parameters())[E].grad, dict(plain.named_parameters())[E].grad)
    # gradients under the names of the files, by the writer that saves the values
    grads = {n: p.grad for n, p in model.named_parameters()}
    stored = {n: StoredTensor.of(g) for n, g in grads.items() if g is not None}
    buffers = {n: StoredTensor.of(b) for n, b in model.named_buffers()}
    found = model.mtp.in_files(buffers | stored, model)
    assert found.keys() == head.keys()
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            # Transformers 5.24 has the router in float32 in every model
            near = {"rtol": 1e-5, "atol": 1e-6} if name.endswith("mlp.gate.weight") else {}
            torch.testing.assert_close(found[name].read(), leaf.grad, msg=name, check_dtype=not near, **near)
    assert sum(leaf.grad is not None for leaf in leaves.values()) > 20 * count


def train_one_step(model, ids):
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return model.eval()


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_folder_goes_in_and_out(name, tmp_path):
    """Untrained to the same bytes; trained, every tensor of a head moves that a loss can move."""
    head = make_folder(tmp_path / "in", name, torch.float32, heads=2)
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32, mtp_loss=WEIGHT)
    model.save_pretrained(tmp_path / "out")
    assert_equal_folders(tmp_path / "in", tmp_path / "out")
    train_one_step(model, make_ids(2, 9))
    fmoe_ext.export(model, tmp_path / "trained", model.config.model_type)
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("in", "trained"))
    assert before.keys() == after.keys() >= head.keys()
    assert {key: value.shape for key, value in before.items()} == {key: v.shape for key, v in after.items()}
    same = {key for key in head if torch.equal(before[key], after[key])}
    assert (
        all("e_score_correction_bias" in key or ".experts." in key for key in same)
        and len(same) < len(head) / 2
    )
    for key, own in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(after[f"model.layers.3.{key}.weight"], after[f"{own}.weight"])
    again = fmoe_ext.import_model(tmp_path / "trained", dtype=torch.float32, mtp_loss=WEIGHT).train()
    torch.testing.assert_close(
        again(input_ids=make_ids(2, 9), labels=make_ids(2, 9)).loss,
        model.train()(input_ids=make_ids(2, 9), labels=make_ids(2, 9)).loss,
    )


def test_trained_heads_draft_in_transformers(tmp_path, monkeypatch):
    """MtpModel reads what was trained, and drafts by the logits that our loss has seen."""
    own = [r"model\.layers\.2\."]
    monkeypatch.setattr(transformers.Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", own)
    make_folder(tmp_path / "in", dtype=torch.float32)
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32, mtp_loss=WEIGHT)
    train_one_step(model, make_ids(2, 9)).save_pretrained(tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    theirs = MtpModel.from_pretrained(plain).eval()
    state = theirs.state_dict()
    for name, value in model.mtp.heads.state_dict().items():
        assert torch.equal(state[name], value), name
    ids = make_ids(1, 6)
    with torch.no_grad():
        hidden = plain.model(input_ids=ids[:, :-1]).last_hidden_state
        draft = theirs(ids[:, 1:], hidden, None, torch.arange(1, 6)[None], None)[1][:, 0]
    labels = torch.full((1, 7), -100)
    labels[0, 6] = draft.argmax()
    model.train()(input_ids=torch.cat([ids, labels[:, 6:]], 1), labels=labels)
    torch.testing.assert_close(model.mtp.last_loss, -draft.log_softmax(-1).max())
    drafts = [plain.generate(ids, max_new_tokens=6, do_sample=False, use_mtp=use) for use in (None, True)]
    assert torch.equal(*drafts)  # each draft is verified, so that this shows no more than that it runs


def test_documents_padding_and_accumulation(tmp_path):
    """Of packed documents each gives its own loss, padding on the right none, and microbatches sum to their batch."""
    make_folder(tmp_path / "in", heads=2)
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float64, mtp_loss=WEIGHT).train()
    ids = make_ids(2, 8)

    def sum_of(**kwargs):
        # with a cache Transformers does not see that position_ids begin anew
        model(**kwargs, use_cache=False, num_items_in_batch=torch.tensor(1))
        return model.mtp.last_loss

    apart = sum(sum_of(input_ids=one[None], labels=one[None]) for one in ids)
    torch.testing.assert_close(sum_of(input_ids=ids, labels=ids), apart)
    positions = torch.arange(8).repeat(2)[None]
    packed = ids.reshape(1, 16)
    torch.testing.assert_close(sum_of(input_ids=packed, labels=packed, position_ids=positions), apart)
    padded = F.pad(ids, (0, 3), value=5)
    mask, labels = F.pad(torch.ones_like(ids), (0, 3)), F.pad(ids, (0, 3), value=-100)
    torch.testing.assert_close(sum_of(input_ids=padded, labels=labels, attention_mask=mask), apart)
    with pytest.raises(ValueError, match="padding on the right alone"):
        sum_of(input_ids=padded, labels=labels, attention_mask=mask.flip(1))
    with pytest.warns(UserWarning, match="without labels trains no heads"):
        assert model(input_ids=ids).loss is None  # as trainers call it that compute their own loss
    with pytest.raises(ValueError, match="input_ids and labels of whole sequences"):
        model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids)
    with torch.no_grad():  # as generate() calls it
        model(input_ids=ids)
    assert model.eval()(input_ids=ids, labels=ids).loss < model.train()(input_ids=ids, labels=ids).loss
    model.zero_grad()
    model(ids[:, :2], labels=ids[:, :2]).loss.backward()
    assert model.mtp.last_loss == 0  # too short for any head
    assert all((p.grad == 0).all() for p in model.mtp.parameters())  # which DDP waits for
    given = model(ids, torch.ones_like(ids), None, None, None, ids).loss  # by position
    assert torch.equal(given, model(input_ids=ids, labels=ids).loss)


def test_trainer_trains_saves_and_resumes(tmp_path):
    make_folder(tmp_path / "in", dtype=torch.float32)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in make_ids(8, 8)]

    def trainer():
        model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32, mtp_loss=WEIGHT)
        arguments = transformers.TrainingArguments(
            tmp_path / "run", max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=0.01,
            gradient_accumulation_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        return transformers.Trainer(model, arguments, train_dataset=rows)

    whole = trainer()
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert any(name.startswith("mtp.") for name in expected) and expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    other = copy.deepcopy(resumed.model).train()
    ids = make_ids(2, 8)
    assert torch.equal(
        other(input_ids=ids, labels=ids).loss, resumed.model.train()(input_ids=ids, labels=ids).loss
    )
    with torch.no_grad():
        other.get_input_embeddings().weight.zero_()  # its own, not the first one's
    assert not torch.equal(
        other(input_ids=ids, labels=ids).loss, resumed.model(input_ids=ids, labels=ids).loss
    )


def test_threads_and_copies_have_their_own_forward(tmp_path):
    make_folder(tmp_path / "in")
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float64, mtp_loss=WEIGHT).train()
    batches = make_ids(2, 9), make_ids(3, 6)
    expected = [model(input_ids=ids, labels=ids).loss for ids in batches]
    barrier = threading.Barrier(2, timeout=60)

    def wait(*_):  # until both threads are in a forward
        barrier.wait()

    hook = model.lm_head.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda ids: model(input_ids=ids, labels=ids).loss, batches)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    hook.remove()
    ids = batches[0]
    model.model(input_ids=ids)  # a part of a forward, whose hidden states have a graph
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=ids, labels=ids).loss, expected[0])


def test_heads_have_the_dtypes_and_the_autocast_of_the_model(tmp_path):
    make_folder(tmp_path / "in", dtype=torch.float32)
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.bfloat16, mtp_loss=WEIGHT).train()
    dtypes = {name: value.dtype for name, value in model.mtp.state_dict().items()}
    plain = transformers.Glm4MoeForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    layer = plain.model.layers[-1].state_dict()  # Transformers 5.24 keeps the router in float32 too
    kept = {name for name, value in layer.items() if value.dtype != torch.bfloat16}
    found = {name for name, dtype in dtypes.items() if dtype != torch.bfloat16}
    assert kept and {name.partition("mlp.")[2] for name in found} == {
        name.partition("mlp.")[2] for name in kept
    }
    assert len(dtypes) > 15
    ids = make_ids(2, 9)
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32, mtp_loss=WEIGHT).train()
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids)
    expected = model.mtp.last_loss
    own = model.forward

    def forward(*args, **kwargs):  # as Accelerate puts it around
        with torch.autocast("cpu", torch.bfloat16):
            return own(*args, **kwargs)

    model.forward = forward
    model(input_ids=ids, labels=ids)
    assert torch.equal(model.mtp.last_loss, expected)
    del model.forward
    model(input_ids=ids, labels=ids)
    assert not torch.equal(model.mtp.last_loss, expected)


def test_heads_that_cannot_train_are_refused_by_name(tmp_path, monkeypatch):
    tiny_model("Qwen3MoeForCausalLM", torch.float32).save_pretrained(tmp_path / "none")
    with pytest.raises(
        CheckpointError, match=r"mtp_loss=0\.1: the files of this Qwen3MoeForCausalLM have no heads"
    ):
        fmoe_ext.import_model(tmp_path / "none", mtp_loss=0.1)
    add_heads(tiny_model("Qwen3NextForCausalLM", torch.float32), tmp_path / "next")
    with pytest.raises(
        CheckpointError, match="Transformers has no modules for the heads of Qwen3NextForCausalLM"
    ):
        fmoe_ext.import_model(tmp_path / "next", mtp_loss=0.1)
    make_folder(tmp_path / "in")
    with pytest.raises(ValueError, match=r"mtp_loss must be a number of at least 0, but got -1\.0"):
        fmoe_ext.import_model(tmp_path / "in", mtp_loss=-1.0)
    with pytest.raises(
        CheckpointError, match=r"heads train with a model on one device, but .* is on cpu, meta"
    ):
        parts = {
            "model.embed_tokens": "disk",
            **dict.fromkeys(["model.layers", "model.norm", "model.rotary_emb", "lm_head"], "cpu"),
        }
        fmoe_ext.import_model(
            tmp_path / "in", mtp_loss=0.1, device_map=parts, offload_folder=tmp_path / "disk"
        )
    monkeypatch.delattr("transformers.modeling_layers.MtpModel")
    with pytest.raises(CheckpointError, match="pip install -U transformers, or leave mtp_loss out"):
        fmoe_ext.import_model(tmp_path / "in", mtp_loss=0.1)


def test_gguf_has_the_trained_heads(tmp_path):
    gguf = pytest.importorskip("gguf")
    make_folder(tmp_path / "in", dtype=torch.float32)
    model = fmoe_ext.import_model(tmp_path / "in", dtype=torch.float32, mtp_loss=WEIGHT)
    train_one_step(model, make_ids(2, 9))
    with pytest.warns(UserWarning, match="no vocabulary"):
        fmoe_ext.export(model, tmp_path / "out", "gguf")
    found = {
        t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors
    }
    layer = model.mtp.heads.layers[0]
    assert torch.equal(found["blk.2.nextn.eh_proj.weight"], layer.eh_proj.weight)
    assert torch.equal(found["blk.2.ffn_down_exps.weight"], layer.mtp_block.mlp.experts.down_proj)
