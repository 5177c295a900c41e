"""FairScale's Pipe: its quick start, and the classifier of its article, which must become an nn.Sequential."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from fmoe_ext.compat.fairscale import Pipe, balance_by_time
from fmoe_ext.pipeline import split


def test_quick_start_trains_as_the_module_itself():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    start = [p.detach().clone() for p in model.parameters()]
    data, target = torch.randn(20, 10), torch.randint(0, 2, size=(20, 1)).squeeze()

    def step(model):
        optimizer = optim.SGD(model.parameters(), lr=0.001)
        optimizer.zero_grad()
        outputs = model(data.requires_grad_())
        loss = F.nll_loss(outputs, target)
        loss.backward()
        optimizer.step()
        return loss.item(), [p.detach().clone() for p in model.parameters()]

    piped, trained = step(Pipe(model, balance=[2, 1]))
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(value)
    loss, expected = step(model)
    assert piped == pytest.approx(loss, rel=1e-6)
    for ours, theirs in zip(trained, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4))
        self.classifier = nn.Sequential(nn.Linear(4 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        x = self.features(x)
        return self.classifier(torch.flatten(x, 1))


def test_classifier_with_flatten_in_forward_is_told_what_to_write():
    with pytest.raises(
        TypeError, match=r"but got Classifier: .* for example nn\.Flatten\(\) for torch\.flatten"
    ):
        Pipe(Classifier(), balance=[3, 3])


def test_classifier_as_a_sequence_equals_the_module():
    torch.manual_seed(0)
    plain = Classifier().double()
    model = nn.Sequential(*plain.features, nn.Flatten(), *plain.classifier)
    images = torch.randn(12, 3, 32, 32, dtype=torch.float64)
    balance = balance_by_time(2, model, images[:2], timeout=0.01)
    assert sum(balance) == 7

    pipe = Pipe(model, balance=balance, devices=["cpu", "cpu"], chunks=4, checkpoint="always")
    torch.testing.assert_close(pipe(images), plain(images), rtol=1e-12, atol=1e-12)


def test_split_with_the_layers_in_the_place_of_stages_names_by():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    sample = torch.ones(2, 2)
    with pytest.raises(
        TypeError, match=r"got \[3, 3\]; give the layers of each stage by by=: split\(model, 2, "
    ):
        split(model, [3, 3], sample)
    assert [len(stage.layers) for stage in split(model, 2, sample, by=[3, 3])] == [3, 3]
