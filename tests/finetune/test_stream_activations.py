"""Inputs of checkpointed layers in a file: the same bits, less memory, and nothing left behind."""

import os
import resource

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fmoe_ext
from fmoe_ext.finetune.streaming.activations import ActivationFile
from tests.finetune.streamed_models import checkpoint_layers, save, streamed, with_adapters
from tests.huggingface.huggingface_models import make_ids, step


def trained(folder, **options):
    model = with_adapters(streamed(folder, 2, 10**6, **options)).train()
    checkpoint_layers(model)
    return model


def size_of(file):
    return os.fstat(file._file).st_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_and_nothing_left(tmp_path, dtype):
    folder, scratch = save(tmp_path / "model", dtype=dtype), tmp_path / "scratch"
    scratch.mkdir()
    plain, ours = trained(folder), trained(folder, activations=scratch)
    file = ours.expert_stream.activations
    expected, found = step(plain, make_ids()), step(ours, make_ids())
    assert torch.equal(found[0], expected[0])
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert torch.equal(found[2][name], gradient), name
    of_inputs = 5 * make_ids().numel() * ours.config.hidden_size * dtype.itemsize
    assert of_inputs <= file.bytes_written <= 2 * of_inputs
    loss = ours(make_ids(), labels=make_ids()).loss
    assert file.num_bytes >= of_inputs and size_of(file) >= of_inputs and not list(scratch.iterdir())
    loss.backward()
    del loss
    assert file.num_bytes == size_of(file) == 0 and not list(scratch.iterdir())


def test_inputs_are_not_in_memory(tmp_path):
    """But that of the first layer: autograd keeps a leaf of a graph."""
    folder, alive = save(tmp_path / "model", dtype=torch.float32), {}
    for where in (None, tmp_path):
        inputs = []
        ours = trained(folder, activations=where)
        for layer in ours.base_model.model.model.layers:
            layer.register_forward_pre_hook(
                lambda _, a, to=inputs: to.append(StorageWeakRef(a[0].untyped_storage()))
            )
        loss = ours(make_ids(), labels=make_ids()).loss
        alive[where] = [not storage.expired() for storage in inputs]
        loss.backward()
    assert alive == {None: [True] * 5, tmp_path: [True] + [False] * 4}


def test_full_disk(tmp_path):
    folder, scratch = save(tmp_path / "model", dtype=torch.float32), tmp_path / "scratch"
    scratch.mkdir()
    ours = trained(folder, activations=scratch)
    file = ours.expert_stream.activations
    expected = step(trained(folder), make_ids())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"scratch has no room for the inputs of layers: .* bytes are needed"
        ):
            ours(make_ids(), labels=make_ids())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.num_bytes == size_of(file) == 0 and not list(scratch.iterdir())
    found = step(ours, make_ids())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[2][name], gradient) for name, gradient in expected[2].items())


def test_tensors_longer_than_a_read(tmp_path):
    file = ActivationFile(tmp_path)
    values = [torch.randn(n).to(dtype) for n, dtype in ((3_000_001, torch.bfloat16), (5, torch.float64))]
    values.append(torch.randn(700, 1000).T)
    kept = [file.put(value) for value in values]
    for stored, value in zip(kept, values, strict=True):
        assert torch.equal(file.get(stored), value)
    offset = kept[1].offset
    kept[1] = file.put(values[1])
    assert kept[1].offset != offset
    assert torch.equal(file.get(kept[1]), values[1])
    assert file.put(values[1]).offset == offset  # space that became free


def test_folder_that_does_not_exist(tmp_path):
    folder = save(tmp_path / "model", dtype=torch.float32)
    with pytest.raises(FileNotFoundError, match="absent"):
        streamed(folder, activations=tmp_path / "absent")
    # before a file of the model is read, which takes minutes for a large one
    with pytest.raises(FileNotFoundError, match="absent"):
        fmoe_ext.stream(tmp_path / "no model", activations=tmp_path / "absent")
