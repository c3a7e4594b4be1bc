"""Toy modules that read and write with boolean masks, all of which `WhereIndexing` rewrites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SHAPE = (3, 5, 4)  # of x; labels are [3, 5]


class Toy(nn.Module):
    """The weights that the toys share."""

    memory: Tensor
    flags: Tensor
    linear: Any

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(4), requires_grad=False)
        self.one_row = nn.Embedding(1, 4)
        self.scalar = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("memory", torch.zeros(SHAPE))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.linear = nn.Linear(4, 4)
        self.threshold = 0.5
        self.log: list[Tensor] = []
        self.requires_grad_(False)


class Fill(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 2
        x[labels == 1] = 0.3
        x[(labels == 0) | ~(labels < 2)] = -float("inf")
        x[x > self.threshold] = float("nan")
        return x


class FillInteger(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = x.long() + 1
        y[labels == 1] = 2.7
        y[labels == 0] += 3
        return y


class Row(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.clone()
        x[labels == 1] = self.row
        x[labels == 0] = self.one_row.weight
        x[labels == 2] = self.scalar
        x[labels == 3] *= self.one_row.weight * self.scalar
        x[labels == -1] /= self.row
        x[labels > 1] -= self.scalar
        return x


class Chain(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = x + 1
        mask = labels == 1
        y[mask] = 3 - abs(-x[mask] * self.row) / 7.0
        x = x * 1
        x[labels == 0] = x[labels == 0] * self.row + self.one_row.weight  # equal masks, computed twice
        rows = y[mask]
        y[labels >= 1] = 0.0
        y[mask] = rows + rows  # read before a write, written after it
        rows = x[mask]
        twice = rows * 2
        rows += self.row
        x[mask] = rows - twice
        return x + y


class TwoSources(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 1
        y = x[..., :1] + 1
        z = x * 1
        z[mask] += y[mask] * self.row
        y[mask] = 2 * y[mask] - y[mask]
        return z + y


class Copies(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        mask = labels.to(torch.int64) != 0
        y[mask] = x[mask]
        return y


class FullMask(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(x)
        x[x == 0] = -1.0
        x[torch.isnan(x)] = self.scalar
        return x


class Buffer(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.row
        x[self.flags] = 0.0
        return x


class WritesMask(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 1
        mask[labels == 0] = True
        x = x + 1
        x[mask] = 0.0
        return x


class Viewed(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = (x + 1).reshape(-1, 4)
        x[labels.reshape(-1) == 1] += self.row
        x = x.view(3, 5, 4)
        return x.sum(dim=1)


class FromChild(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.linear(x)
        x[labels == 1] = 0.0
        y = self.helper(x)
        y[labels == 0] = 0.0
        return y

    def helper(self, x: Tensor) -> Tensor:
        return x + self.row


class Loops(Toy):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        for index in range(3):
            x[labels == index] += index
        return x


class Optional(Toy):
    def forward(self, x: Tensor, labels: Tensor | None = None, twice: bool = False) -> Tensor:
        x = x * 1
        if labels is not None:
            x[labels == 1] = 0.0
            if twice:
                x[labels == 0] = 1.0
        return x


SOUND: list[type[Toy]] = [Fill, FillInteger, Row, Chain, TwoSources, Copies, FullMask, Buffer]
SOUND += [WritesMask, Viewed, FromChild, Loops]
