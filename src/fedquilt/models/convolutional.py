"""The papers' convolutional networks: ModFL's two, FedDL's two, the thesis', FedEM's and FedRep's."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from fedquilt.models.blocks import Modular, dense


def _cifar_side(channels: int, pixels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(128 * (pixels // 4) ** 2, 256), nn.ReLU(),
    )  # fmt: skip


def _stl_side(channels: int, pixels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(128 * (pixels // 8) ** 2, 256), nn.ReLU(),
    )  # fmt: skip


class ModflCifar(Modular):
    """ModFL's CIFAR-10 network: conv 32-64-128 with average pooling between, FC 256 | FC 128-64, output.

    Kernels of 3 x 3 with padding were chosen here; the paper does not give them.

    >>> import torch
    >>> ModflCifar()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 9])
    """

    def __init__(self, classes: int = 9, channels: int = 3, pixels: int = 32) -> None:
        super().__init__(partial(_cifar_side, channels, pixels), partial(dense, 256, 128, 64, classes))
        self.input_shape = (channels, pixels, pixels)


class ModflStl(Modular):
    """ModFL's STL-10 network: conv 16-32-64-128 with max pooling between, FC 256 | FC 128-64, output.

    Kernels of 3 x 3 with padding were chosen here; the paper does not give them.

    >>> import torch
    >>> ModflStl(pixels=16, channels=1)(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 9])
    """

    def __init__(self, classes: int = 9, channels: int = 3, pixels: int = 96) -> None:
        super().__init__(partial(_stl_side, channels, pixels), partial(dense, 256, 128, 64, classes))
        self.input_shape = (channels, pixels, pixels)


class FeddlImages(nn.Module):
    """FedDL's network for images: two convolutions, two fully connected layers and the output, each a unit.

    The paper gives the number of layers only; 16 and 32 filters of 5 x 5 and layers of 128 and 64 were chosen here.

    >>> import torch
    >>> FeddlImages(channels=1, height=60, width=30, classes=4)(torch.zeros(2, 1, 60, 30)).shape
    torch.Size([2, 4])
    """

    def __init__(self, classes: int = 10, channels: int = 1, height: int = 36, width: int = 36) -> None:
        super().__init__()
        self.input_shape = (channels, height, width)
        self.conv1 = nn.Conv2d(channels, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 128)
        self.fc2 = nn.Linear(128, 64)
        self.output = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        out: Tensor = self.output(x)
        return out


class FeddlSignals(nn.Module):
    """FedDL's network for signals: two convolutions in time, two fully connected layers and the output, each a unit.

    The paper gives the number of layers only; 32 and 64 filters of length 5 and layers of 128 and 64 were chosen here.

    >>> import torch
    >>> FeddlSignals()(torch.zeros(2, 6, 128)).shape
    torch.Size([2, 6])
    """

    def __init__(self, classes: int = 6, channels: int = 6, length: int = 128) -> None:
        super().__init__()
        self.input_shape = (channels, length)
        self.conv1 = nn.Conv1d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv1d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (length // 4), 128)
        self.fc2 = nn.Linear(128, 64)
        self.output = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        out: Tensor = self.output(x)
        return out


class ThesisCNN(nn.Module):
    """A CNN for the thesis' experiments: conv 32 and 64 of 3 x 3 with max pooling, FC 64, output.

    The thesis' text does not describe its network; this common tutorial network was chosen here.

    >>> import torch
    >>> ThesisCNN(channels=3, pixels=32)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, channels: int = 1, pixels: int = 28) -> None:
        super().__init__()
        self.input_shape = (channels, pixels, pixels)
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * (pixels // 4) ** 2, 64)
        self.output = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.output(F.relu(self.fc1(x.flatten(1))))
        return out


class FedemCNN(nn.Module):
    """FedEM's network for EMNIST and FEMNIST: conv 32 and 64 of 5 x 5 with max pooling, FC 2048, output.

    The sizes are those of the program FedEM's authors published.

    >>> import torch
    >>> FedemCNN()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 62])
    """

    def __init__(self, classes: int = 62, hidden: int = 2048) -> None:
        super().__init__()
        self.input_shape = (1, 28, 28)
        self.conv1 = nn.Conv2d(1, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * 4 * 4, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.output(F.relu(self.fc1(x.flatten(1))))
        return out


class FedrepCNN(nn.Module):
    """FedRep's network for CIFAR: conv 6 and 16 of 5 x 5 with max pooling, FC 120 and 100, output.

    The sizes are those of the program FedRep's authors published.

    >>> import torch
    >>> FedrepCNN()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.input_shape = (3, 32, 32)
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 100)
        self.output = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        out: Tensor = self.output(x)
        return out
