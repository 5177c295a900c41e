"""FastMoE's files: as FastMoE wrote them for a job of several ranks, read, merged, written; nothing in them is run."""

import argparse
import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP, checkpoint
from fmoe_ext.checkpoint import CheckpointError, merge_fastmoe, read_fastmoe, write_fastmoe
from fmoe_ext.checkpoint.convert import read
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.experts import to_per_expert_layout

D, H, E, RANKS = 6, 5, 4, 2
LAYER = "layers.0.mlp"
PREFIX = f"language_model.transformer.{LAYER}."


class Model(nn.Module):
    def __init__(self, num_expert=E):
        super().__init__()
        self.language_model = nn.ModuleDict({"transformer": nn.Module(), "embedding": nn.Embedding(7, D)})
        block = nn.ModuleDict({"mlp": FMoETransformerMLP(num_expert, D, H), "norm": nn.LayerNorm(D)})
        self.language_model.transformer.layers = nn.ModuleList([block])


class Unknown:
    """An object of the user's, as Megatron pickles its args and enums."""


def random_model():
    torch.manual_seed(0)
    model = Model()
    for param in model.parameters():
        nn.init.normal_(param)
    return model


def state_of_rank(state, rank, per_expert):
    """Part of the whole state on a rank: its experts under local numbers, in one of FastMoE's two layouts."""
    local = E // RANKS
    mine = {}
    for name, value in state.items():
        mine[name] = value[rank * local : (rank + 1) * local].clone() if ".experts." in name else value
    return to_per_expert_layout(mine) if per_expert else mine


def nested(state):
    """Megatron's nesting: components down to the transformer, flat below."""
    tree = {"language_model": {"transformer": {}, "embedding": {}}}
    for name, value in state.items():
        _, part, rest = name.split(".", 2)
        tree["language_model"][part][rest] = value
    return tree


def write_as_fastmoe_did(folder, state, per_expert=True, mp="mp_rank_00", **more):
    for rank in range(RANKS):
        whole = state_of_rank(state, rank, per_expert)
        mine = {k: v for k, v in whole.items() if rank == 0 or ".experts." in k}
        content = {"model": nested(mine)}
        if rank == 0:
            content |= {
                "args": argparse.Namespace(hidden_size=D, fmoefy=True),
                "checkpoint_version": 3.0,
                "iteration": 20,
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "optimizer": {"state": {0: {"step": 3, "exp_avg": torch.zeros(2)}}, "param_groups": []},
                **more,
            }
        name = mp if rank == 0 else f"{mp}_dp_rank_{rank:04d}"
        path = folder / "iter_0000020" / name
        path.mkdir(parents=True)
        torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    return folder / "iter_0000020"


def values(tensors):
    return {name: tensor.read() for name, tensor in tensors.items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("per_expert", [True, False])
def test_merged(tmp_path, per_expert):
    model = random_model()
    iteration = write_as_fastmoe_did(tmp_path, model.state_dict(), per_expert)
    for path in (tmp_path, iteration):
        tensors, files, step = read_fastmoe(path)
        assert step == 20 and [f.parent.name for f in files] == ["mp_rank_00", "mp_rank_00_dp_rank_0001"]
        assert_same(values(tensors), model.state_dict())
    other = Model()
    other.load_state_dict(values(tensors))
    x = torch.randn(9, D)
    mlp, of_other = (m.language_model.transformer.layers[0].mlp for m in (model, other))
    assert torch.equal(of_other(x), mlp(x))


def test_whole_state_dicts_of_all_ranks():
    """FastMoE without Megatron: every rank saved its model, often wrapped."""
    state = random_model().state_dict()
    models = [state_of_rank(state, rank, per_expert=True) for rank in range(RANKS)]
    assert_same(values(merge_fastmoe(models)), dict(state))


def test_other_experts_keep_their_modules():
    name = "experts.{}.htoh4.weight"  # of nn.Linear, not of FMoELinear
    models = [{name.format(i): torch.full((2, 3), 2.0 * rank + i) for i in (0, 1)} for rank in (0, 1)]
    expected = {name.format(e): torch.full((2, 3), float(e)) for e in range(4)}
    assert_same(values(merge_fastmoe(models)), expected)


def own_experts(*numbers, leaf="fc.weight"):
    return {f"mlp.experts.{i}.{leaf}": torch.full((3, 4), float(i)) for i in numbers}


def htoh4(num_experts):
    return {f"mlp.experts.{i}.htoh4.weight": torch.zeros(1, 3, 4) for i in range(num_experts)}


@pytest.mark.parametrize(
    ("gate", "experts"),
    [
        ({"mlp.gate.w_gate": torch.zeros(4, 6)}, htoh4(2)),  # NoisyGate: [D, E]
        ({"mlp.gate.gate.weight": torch.zeros(6, 4)}, own_experts(0, 1)),
        ({"mlp.gate.w_gate": torch.zeros(4, 6)}, own_experts(0, 1)),
    ],
)
def test_gates_show_missing_last_ranks(gate, experts):
    """Only gate.gate.weight beside a fused MLP did."""
    assert len(merge_fastmoe([experts | gate, experts, experts])) in (2, 7)
    for num_ranks in (1, 2):
        text = rf"mlp\.experts: the gate is for 6 experts, but the files have {2 * num_ranks}:"
        with pytest.raises(CheckpointError, match=text):
            merge_fastmoe([experts | gate, *[experts] * (num_ranks - 1)])


def test_numbers_of_experts_are_kept_and_gaps_refused():
    """Experts 0 and 2 became 0 and 1, and the bias that expert 1 alone has became expert 0's."""
    for numbers in ((0, 2), (1,), (0, 10**12)):
        for num_ranks in (1, 2):
            with pytest.raises(CheckpointError, match=rf"up to number {numbers[-1]}, but no expert [01]$"):
                merge_fastmoe([own_experts(*numbers)] * num_ranks)
    models = [own_experts(0, 1) | own_experts(1, leaf="fc.extra")] * 2
    assert [name for name in merge_fastmoe(models) if "extra" in name] == [
        "mlp.experts.1.fc.extra",
        "mlp.experts.3.fc.extra",
    ]
    models[0] = htoh4(2) | {"mlp.experts.1.htoh4.bias": torch.zeros(1, 3)}
    with pytest.raises(CheckpointError, match=r"mlp\.experts: 1 of 2 experts have htoh4\.bias"):
        merge_fastmoe(models[:1])


def test_numbers_among_the_experts():
    """A tensor without dimensions was an IndexError."""
    scale = {"mlp.experts.scale": torch.tensor(2.0)}
    assert_same(values(merge_fastmoe([scale])), scale)
    for models in ([scale, scale], [{"mlp.experts.htoh4.bias": torch.tensor(1.0)}]):
        with pytest.raises(CheckpointError, match=r"mlp\.experts\.[\w.]+ is a number"):
            merge_fastmoe(models)
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.scale is a number"):
        merge_fastmoe([{"mlp.experts.scale": torch.zeros(1)}, scale])


@pytest.mark.parametrize("at", ["mp_rank_00", "mp_rank_00/model_optim_rng.pt"])
def test_links_out_of_the_folder_are_refused(tmp_path, at):
    iteration = write_as_fastmoe_did(tmp_path / "job", random_model().state_dict())
    (iteration / at).rename(tmp_path / "elsewhere")
    (iteration / at).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"is a link to .*elsewhere, outside the folder"):
        read_fastmoe(tmp_path / "job")


def test_views_are_written_without_what_they_are_views_of(tmp_path):
    write_fastmoe(tmp_path, {"a": StoredTensor.of(torch.arange(100_000.0)[5:8])})
    tensors, (file,), _ = read_fastmoe(tmp_path)
    assert file.stat().st_size < 4000 and tensors["a"].read().tolist() == [5.0, 6.0, 7.0]


def test_misfitting_files_are_refused(tmp_path):
    state = random_model().state_dict()
    folder = write_as_fastmoe_did(tmp_path, state)
    second = folder / "mp_rank_00_dp_rank_0001" / "model_optim_rng.pt"
    content = torch.load(second)
    torch.save({"model": {}}, second)
    with pytest.raises(
        CheckpointError, match=rf"layers\.0\.mlp\.experts: the gate is for {E} experts, but .* have 2"
    ):
        read_fastmoe(tmp_path)
    models = [state_of_rank(state, rank, per_expert=True) for rank in range(RANKS)]
    del models[1][f"{PREFIX}experts.1.htoh4.bias"]
    with pytest.raises(
        CheckpointError, match=r"ranks 0 and 1 do not both have .*mlp\.experts\.1\.htoh4\.bias$"
    ):
        merge_fastmoe(models)
    models = [state_of_rank(state, rank, per_expert=True) for rank in range(RANKS)]
    models[1][f"{PREFIX}experts.1.htoh4.bias"] = torch.zeros(1, 2 * H)
    with pytest.raises(CheckpointError, match="differs between ranks"):
        merge_fastmoe(models)
    torch.save(content, second)
    (folder / "mp_rank_00_dp_rank_0001").rename(folder / "mp_rank_00_dp_rank_0003")
    with pytest.raises(CheckpointError, match=r"up to data-parallel rank 3, but none of \[1, 2\]"):
        read_fastmoe(tmp_path)
    (folder / "mp_rank_01").mkdir()
    torch.save({"model": {}}, folder / "mp_rank_01" / "model_optim_rng.pt")
    with pytest.raises(
        CheckpointError, match="several model-parallel parts, name one: mp_rank_00, mp_rank_01"
    ):
        read_fastmoe(tmp_path)
    with pytest.raises(CheckpointError, match="has no mp_rank_07, only mp_rank_00, mp_rank_01"):
        read_fastmoe(tmp_path, mp_rank="mp_rank_07")
    (tmp_path / "empty").mkdir()
    for mp_rank in (None, "mp_rank_00"):
        with pytest.raises(CheckpointError, match=r"empty has no mp_rank_\*/model_optim_rng\.pt"):
            read_fastmoe(tmp_path / "empty", mp_rank)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    with pytest.raises(CheckpointError, match="says 30, but there is no iter_0000030"):
        read_fastmoe(tmp_path)


def test_files_of_the_distributed_optimizer_are_refused_by_name(tmp_path):
    """As Megatron-LM v3.0.2 names them."""
    for name in ("mp_rank_00/model_rng.pt", "mp_rank_00_000/optim.pt"):
        (tmp_path / name).parent.mkdir()
        torch.save({"model": {}}, tmp_path / name)
    with pytest.raises(
        CheckpointError, match=r"distributed optimizer .*model_rng.*: save without --use-dist"
    ):
        read(tmp_path)


def test_pipeline_stages_are_named(tmp_path):
    state = random_model().state_dict()
    write_as_fastmoe_did(tmp_path, state, mp="mp_rank_00_001")
    assert_same(values(read_fastmoe(tmp_path, mp_rank="mp_rank_00_001")[0]), dict(state))


def test_pickled_objects_need_trust(tmp_path):
    state = random_model().state_dict()
    write_as_fastmoe_did(tmp_path, state, schedule=Unknown())
    with pytest.raises(CheckpointError, match=r"pickled objects \(.*Unknown\).* pass trust=True \(--trust\)"):
        read_fastmoe(tmp_path)
    assert_same(values(read_fastmoe(tmp_path, trust=True)[0]), dict(state))


def test_code_in_files_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    for content in (pickle.dumps(Attack()), b"not a checkpoint", b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt"):
            read_fastmoe(tmp_path)
    torch.save({"model": {}, "x": Attack()}, path)
    with pytest.raises(CheckpointError, match=r"pickled objects \(posix\.mkdir\)"):
        read_fastmoe(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt"):
        read_fastmoe(tmp_path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds a list, expected a dict"):
        read_fastmoe(tmp_path)
    assert not (tmp_path / "attacked").exists()


def test_written_for_another_number_of_ranks(tmp_path):
    state = random_model().state_dict()
    stored = {name: StoredTensor.of(value) for name, value in state.items()}
    write_fastmoe(tmp_path, stored, num_ranks=4, iteration=7)
    tensors, files, step = read_fastmoe(tmp_path)
    assert step == 7 and len(files) == 4
    assert_same(values(tensors), dict(state))
    second = torch.load(files[1])["model"]
    assert torch.equal(second[f"{PREFIX}experts.0.htoh4.weight"], state[f"{PREFIX}experts.htoh4.weight"][1:2])
    assert not any("gate" in name for name in second)
    with pytest.raises(CheckpointError, match="iter_0000007 exists already"):
        write_fastmoe(tmp_path, stored, iteration=7)
    with pytest.raises(CheckpointError, match="4 experts cannot be divided over 3 ranks"):
        write_fastmoe(tmp_path, stored, num_ranks=3, iteration=8)
    assert checkpoint.read_fastmoe(tmp_path)[2] == 7


def test_folder_of_a_killed_conversion_is_removed(tmp_path):
    dead, other = tmp_path / ".iter_0000007.1-abcd.tmp", tmp_path / ".iter_0000008.1-abcd.tmp"
    for folder in (dead / "mp_rank_00", other):
        folder.mkdir(parents=True)
    stored = {name: StoredTensor.of(value) for name, value in random_model().state_dict().items()}
    write_fastmoe(tmp_path, stored, iteration=7)
    written = {"iter_0000007", "latest_checkpointed_iteration.txt"}
    assert {path.name for path in tmp_path.iterdir()} == written | {other.name}
