"""PyTorch's tutorial "Transformer models using Distributed Data Parallel and Pipeline Parallelism", on CPUs."""

import math

import pytest
import torch
from torch import nn
from torch.nn import TransformerEncoderLayer
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext.compat.torch_pipe import LocalResult, NoChunk, Pipe, WithDevice

NTOKENS, EMSIZE, NHEAD, NHID, NLAYERS, BPTT, ROWS = 40, 16, 2, 24, 4, 7, 8


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


class Encoder(nn.Module):
    def __init__(self, ntoken, ninp, dropout=0.5):
        super().__init__()
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.ninp = ninp

    def forward(self, src):
        src = src.t()  # rows first in the pipeline, positions first in the layers
        return self.pos_encoder(self.encoder(src) * math.sqrt(self.ninp))


class Decoder(nn.Module):
    def __init__(self, ntoken, ninp):
        super().__init__()
        self.decoder = nn.Linear(ninp, ntoken)

    def forward(self, inp):
        return self.decoder(inp).permute(1, 0, 2)


def make_layers(dropout, num_gpus=2):
    torch.manual_seed(0)
    partition_len = ((NLAYERS - 1) // num_gpus) + 1
    tmp_list, module_list = [Encoder(NTOKENS, EMSIZE, dropout)], []
    for i in range(NLAYERS):
        if i != 0 and i % partition_len == 0:
            module_list.append(nn.Sequential(*tmp_list))
            tmp_list = []
        tmp_list.append(TransformerEncoderLayer(EMSIZE, NHEAD, NHID, dropout))
    tmp_list.append(Decoder(NTOKENS, EMSIZE))
    module_list.append(nn.Sequential(*tmp_list))
    return module_list


def batches(rank, size, steps=3):
    text = torch.randint(NTOKENS, (ROWS, steps * BPTT + 1), generator=torch.Generator().manual_seed(1))
    text = text.chunk(size)[rank]
    for i in range(0, steps * BPTT, BPTT):
        yield text[:, i : i + BPTT], text[:, i + 1 : i + 1 + BPTT].reshape(-1)


def train(model, rank, size, local_value):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    losses = []
    for data, targets in batches(rank, size):
        optimizer.zero_grad()
        output = local_value(model(data))
        loss = criterion(output.reshape(-1, NTOKENS), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def run_worker(options):
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    chunks = 8
    model = Pipe(torch.nn.Sequential(*make_layers(dropout=0.0)), chunks=chunks, checkpoint="never")
    model = DistributedDataParallel(model, **options)
    return train(model, rank, world_size, lambda output: output.local_value())


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_two_replicas_of_two_partitions_train_as_one_process(pool, options):
    """pytorch/pytorch#60118: torch's own Pipe left replicas of a static graph to themselves."""
    losses, parameters = train(nn.Sequential(*make_layers(0.0)), 0, 1, lambda output: output)
    of_ranks = pool.run(run_worker, options)
    assert [sum(pair) / 2 for pair in zip(*(of for of, _ in of_ranks), strict=True)] == pytest.approx(
        losses, 1e-5
    )
    for _, trained in of_ranks:
        for ours, theirs in zip(trained, parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_partitions_and_names_are_those_of_torchs_pipe():
    pipe = Pipe(nn.Sequential(*make_layers(0.1)), 2)
    assert pipe.balance == [3, 3] and len(pipe) == 6 and (pipe.chunks, pipe.checkpoint) == (2, "except_last")
    names = set(pipe.state_dict())
    assert {"partitions.0.0.encoder.weight", "partitions.1.2.decoder.weight"} <= names
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"), nn.Linear(1, 1, device="meta"))
    assert Pipe(mixed).balance == [1, 2]
    assert [
        d.type for d in Pipe(nn.Sequential(nn.Linear(1, 1), WithDevice(nn.Dropout(), "meta"))).devices
    ] == [
        "cpu",
        "meta",
    ]
    torn = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))
    with pytest.raises(ValueError, match=r"layer '0' has parameters on cpu, meta: move it to one device"):
        Pipe(torn)


class Scale(nn.Module):
    def forward(self, x, factor, shift):
        return x * factor, shift


class Shift(nn.Module):
    def forward(self, x, shift):
        return x + shift


def test_layers_and_calls_take_several_arguments():
    pipe = Pipe(nn.Sequential(Scale(), Shift()), chunks=2)
    x, factor = torch.arange(4.0).view(4, 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    output = pipe(x, factor, NoChunk(torch.tensor([[0.5]])))
    assert isinstance(output, LocalResult) and output.is_owner() and output.to_here() is output.local_value()
    assert output.local_value().flatten().tolist() == [0.5, 2.5, 6.5, 12.5]
