"""Images and their classes for train.py: CIFAR-10's binary files, or the handwritten digits that scikit-learn ships."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

SIZE = 32
RECORD = 1 + 3 * SIZE * SIZE  # a byte for the class, then red, green and blue


@dataclass(frozen=True)
class Images:
    """Images [N, 3, 32, 32] and their classes [N], for training and for test.

    Each channel is shifted and scaled so that the training images have mean 0 and deviation 1.
    """

    train: torch.Tensor
    train_classes: torch.Tensor
    test: torch.Tensor
    test_classes: torch.Tensor
    source: str


def load_images(path=None, dtype=torch.float32):
    """The folder with CIFAR-10's data_batch_1.bin ... and test_batch.bin, or scikit-learn's digits."""
    parts = read_cifar(Path(path)) if path else read_digits()
    (train, train_classes), (test, test_classes) = parts
    mean, deviation = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True).clamp(min=1e-3)
    train, test = (((x - mean) / deviation).to(dtype) for x in (train, test))
    return Images(train, train_classes, test, test_classes, str(path or "scikit-learn's handwritten digits"))


def read_cifar(folder):
    batches = sorted(folder.glob("data_batch_*.bin"))
    if not batches or not (folder / "test_batch.bin").exists():
        raise SystemExit(
            f"{folder} has no data_batch_*.bin and test_batch.bin: unpack cifar-10-binary.tar.gz there"
        )
    return read_records(batches), read_records([folder / "test_batch.bin"])


def read_records(files):
    content = bytearray(b"".join(file.read_bytes() for file in files))
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD)
    return records[:, 1:].view(-1, 3, SIZE, SIZE).float() / 255, records[:, 0].long()


def read_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16  # [1797, 1, 8, 8]
    images = F.interpolate(images, SIZE, mode="bilinear").expand(-1, 3, -1, -1)
    classes = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    return (images[train], classes[train]), (images[test], classes[test])
