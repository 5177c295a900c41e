"""prune() keeps heads for the tokens after the next: fewer experts in them, all else as it was."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.compress import prune

transformers = pytest.importorskip("transformers")

from tests.huggingface.moe_architectures import tiny_model  # noqa: E402
from tests.huggingface.moe_heads import add_heads, with_heads  # noqa: E402
from tests.sweeps import rest_is_slow  # noqa: E402

QUICK = (
    "DeepseekV3ForCausalLM",  # a layer behind the others
    "DeepseekV4ForCausalLM",  # names of its own in files
    "MiMoV2FlashForCausalLM",  # model.mtp
    "Qwen3_5MoeForConditionalGeneration",  # mtp beside a model with images; stacks
)
SIZE, NUMBER = 6, 4  # no other dimension of the small models is 6
ONE = re.compile(r"(.*experts\.)(\d+)(\..+)")


def tokens():
    return torch.randint(3, 61, (200,), generator=torch.Generator().manual_seed(3))


def largest(head):
    """The experts of a head with the largest products of norms, by hand."""
    norms = {}
    for name, value in head.items():
        if one := ONE.fullmatch(name):
            norms.setdefault(one[3], {})[int(one[2])] = value.double().norm()
        elif value.dim() == 3 and value.shape[0] == SIZE:
            norms[name] = {e: value[e].double().norm() for e in range(SIZE)}
    scores = torch.stack([torch.stack([of[e] for e in range(SIZE)]) for of in norms.values()]).prod(0)
    return scores.topk(NUMBER).indices.sort().values.tolist()


def expected_head(head, kept):
    found = {}
    for name, value in head.items():
        if one := ONE.fullmatch(name):
            if int(one[2]) in kept:
                found[f"{one[1]}{kept.index(int(one[2]))}{one[3]}"] = value
        elif SIZE in value.shape:
            found[name] = value.index_select([*value.shape].index(SIZE), torch.tensor(kept))
        elif (
            name.endswith("gate.weight") and value.shape[0] == SIZE + 1
        ):  # of Inkling, a shared expert is behind
            found[name] = value[[*kept, SIZE]]
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("name", rest_is_slow(with_heads(), QUICK))
def test_heads_stay_with_their_largest_experts(name, tmp_path):
    model = tiny_model(name, torch.float32)
    head = add_heads(model, tmp_path / "in")
    try:
        report = prune(
            tmp_path / "in", tmp_path / "out", tokens(), experts=NUMBER, seq_len=20, criterion="mass"
        )
    except CheckpointError as error:
        assert "tid2eid" in str(error) and any(key.endswith("tid2eid") for key in head)
        return
    after = load_file(tmp_path / "out/model.safetensors")
    routed = any(
        ONE.fullmatch(key) or (value.dim() == 3 and SIZE in value.shape) for key, value in head.items()
    )
    expected = head
    if routed:
        ((_, of_head),) = report["heads"].items()
        assert of_head["kept"] == largest(head) and of_head["criterion"] == "norms of weights"
        expected = expected_head(head, of_head["kept"])
    for key, value in expected.items():
        assert torch.equal(after.pop(key), value), key
    assert not after.keys() & head.keys()
    before, config = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out"))
    changed = {key for key in before if before[key] != config[key]}
    assert len(changed) == 1 and before.keys() == config.keys()
