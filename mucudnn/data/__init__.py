"""Image data sets for training: read, ordered, augmented and prefetched, in NumPy.

    from mucudnn import data

    images = data.open_dataset("cifar10:DIR", split="train")
    normal = data.Normalize.of(images)
    changed = data.Compose((data.RandomCrop(4), data.RandomFlip(), normal))
    batches = data.Loader(images, 128, transform=changed, drop_last=True)
    for x, labels in batches.epoch(0):
        ...

Each format is one file. A `Dataset` is any object with `classes`, `image_shape`, a
length and `read(indices)`; `ArrayDataset(images, labels)` makes one of arrays, and
`FORMATS` lists the names for `open_dataset`.
"""

from mucudnn.data.arrays import ArrayDataset, FolderDataset, open_arrays, open_folder
from mucudnn.data.cifar import open_cifar10, open_cifar100
from mucudnn.data.dataset import Dataset, Resized, Split, Subset, class_count
from mucudnn.data.formats import (
    FORMATS,
    SyntheticDataset,
    open_dataset,
    open_digits,
    open_mnist,
)
from mucudnn.data.loader import Batch, Loader
from mucudnn.data.transforms import (
    Compose,
    Normalize,
    RandomCrop,
    RandomFlip,
    Transform,
    channel_statistics,
)

__all__ = [
    "FORMATS",
    "ArrayDataset",
    "Batch",
    "Compose",
    "Dataset",
    "FolderDataset",
    "Loader",
    "Normalize",
    "RandomCrop",
    "RandomFlip",
    "Resized",
    "Split",
    "Subset",
    "SyntheticDataset",
    "Transform",
    "channel_statistics",
    "class_count",
    "open_arrays",
    "open_cifar10",
    "open_cifar100",
    "open_dataset",
    "open_digits",
    "open_folder",
    "open_mnist",
]
