"""Toy modules that read and write with boolean masks where `torch.where` would do something else, each with why."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.mask_toys import SHAPE, Toy


class WritesArgument(Toy):
    reason = r"writes to its argument `x`"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x[labels == 1] = 0.0
        return x


class WritesViewOfArgument(Toy):
    reason = r"writes to its argument `x`"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = x.float().reshape(3, 5, 4)  # the argument itself where it is float32
        y[labels == 1] = 0.0
        return y


class WritesBuffer(Toy):
    reason = r"writes to the module's own `memory`"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.memory[labels == 1] = 1.0
        return x + self.memory


class LiveView(Toy):
    reason = r"writes to `add`, and later uses `getitem`, which shares its memory"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + 1
        first = x[:, 0]
        x[labels == 1] = 0.0
        return first


class LiveBase(Toy):
    reason = r"later uses `add`, which shares its memory"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + 1
        flat = x.view(-1, 4)
        flat[labels.view(-1) == 1] = 0.0
        return x


class Expanded(Toy):
    reason = r"a view that need not hold its elements once"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = (x[:, :1] + 1).expand(3, 5, 4)
        x[labels == 1] = 0.0
        return x


class Permuted(Toy):
    reason = r"a view that need not hold its elements once"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = (x + 1).permute(1, 0, 2)
        x[labels.permute(1, 0) == 1] = 0.0
        return x


class ReadEscapes(Toy):
    reason = r"it reads `x` with a mask for more than a write"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return x[labels == 1]


class ReadIsReduced(Toy):
    reason = r"it reads `add` with a mask for more than a write"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + 1
        x[labels == 1] = 0.0
        return x[labels == 0].sum()


class ReadAlsoEscapes(Toy):
    reason = r"it reads `mul` with a mask for more than a write"

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        mask = labels == 1
        x = x * 1
        rows = x[mask] + 1
        x[mask] = rows
        return x, rows


class NotElementwise(Toy):
    reason = r"`self.linear` between a read and a write need not round alike"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 1
        x = x * 1
        x[mask] = self.linear(x[mask])
        return x


class Transcendental(Toy):
    reason = r"`sin` between a read and a write need not round alike"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 1
        x = x * 1
        x[mask] = torch.sin(x[mask])
        return x


class AddsToAWeight(Toy):
    reason = r"it changes `mul_1` in place"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        row = self.one_row.weight * 1
        row += x[labels == 1]
        x[labels == 1] = row
        return x


class RowPerTrue(Toy):
    reason = r"it writes `values`, which may hold one row for each True"

    def forward(self, x: Tensor, labels: Tensor, values: Tensor) -> Tensor:
        x = x * 1
        x[labels == 1] = values
        return x


class TwoMasks(Toy):
    reason = r"reads `mul` with one mask and writes with another"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        x[labels == 1] = x[labels == 0]
        return x


class MaskChanges(Toy):
    reason = r"changes `mul` or its mask between read and write"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 1
        x = x * 1
        rows = x[mask]
        mask.logical_not_()
        x[mask] = rows
        return x


class MaskOfChangedValues(Toy):
    reason = r"reads `mul` with one mask and writes with another"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        y = x + 1
        rows = x[y > 0]
        y.neg_()
        x[y > 0] = rows
        return x


class SourceChanges(Toy):
    reason = r"changes `mul` or its mask between read and write"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 1
        x = x * 1
        rows = x[mask]
        x += 1
        x[mask] = rows
        return x


class RandomMask(Toy):
    reason = r"reads `mul` with one mask and writes with another"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        x[torch.rand(3, 5) > 0.5] = x[torch.rand(3, 5) > 0.5]
        return x


class UnknownIndex(Toy):
    reason = r"nothing tells whether the index `where_` is a boolean mask"

    def forward(self, x: Tensor, where_: Tensor) -> Tensor:
        x = x * 1
        x[where_] = 0.0
        return x


class MixedIndex(Toy):
    reason = r"may mix a mask with other indices"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        x[labels == 1, 0] = 0.0
        return x


def keep(x: Tensor) -> Tensor:
    """What nothing is known of."""
    return x


class Handed(Toy):
    reason = r"what `keep` returned, which others may hold"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = keep(x * 1)
        x[labels == 1] = 0.0
        return x


class HandedOver(Toy):
    reason = r"writes to `mul`, which `keep` may have kept"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        keep(x)
        x[labels == 1] = 0.0
        return x


class ChildReturnsItsBuffer(Toy):
    reason = r"what `self.helper` returned, which others may hold"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.helper()
        y[labels == 1] = 1.0
        return x + y

    def helper(self) -> Tensor:
        return self.memory.view(SHAPE)


class ChildMayChangeTheSource(Toy):
    reason = r"`helper` changes `memory` or its mask"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 1
        rows = self.memory[mask]
        self.helper()
        x = x * 1
        x[mask] = rows
        return x

    def helper(self) -> None:
        self.memory.add_(1)


class ChangesArgumentToo(Toy):
    reason = r"it also changes `labels`"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels += 1
        x = x * 1
        x[labels == 1] = 0.0
        return x


class DataDependent(Toy):
    reason = r"control flow depends on the values of tensors"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x * 1
        if (labels == 1).any():
            x[labels == 1] = 0.0
        return x


class Variadic(Toy):
    reason = r"\*args"

    def forward(self, *args: Tensor) -> Tensor:
        x = args[0] * 1
        x[args[1] == 1] = 0.0
        return x


class SetsAttribute(Toy):
    reason = r"sets an attribute: `self.last`"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.last = labels
        x = x * 1
        x[labels == 1] = 0.0
        return x


class Logs(Toy):
    reason = r"reads `self.log`, a list, which may change"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.log.append(x)
        x = x * 1
        x[labels == 1] = 0.0
        return x


DECLINED = [toy for toy in list(globals().values()) if isinstance(toy, type) and hasattr(toy, "reason")]
