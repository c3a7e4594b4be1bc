"""The utility that finds synchronising operations finds each kind, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from samopt.profiling.syncs import fake_cuda, on_fake_cuda, record_syncs

MASK = torch.tensor([True, False, True])


def write_rows(x: Tensor, mask: Tensor) -> None:
    x[mask] = x[mask] + 1


@pytest.mark.parametrize(
    ("run", "reasons"),
    [
        (lambda x, mask: x[mask], ["reads with a boolean mask"]),
        (write_rows, ["reads with a boolean mask", "writes with a boolean mask"]),
        (lambda x, mask: x.index_put_((mask,), x[0]), ["writes with a boolean mask"]),
        (lambda x, mask: x.index_put_((mask,), x[0, 0]), ["writes with a boolean mask"]),
        (lambda x, mask: x[torch.tensor([0, 1])], ["indexes with a tensor of the host"]),
        (lambda x, mask: mask.nonzero(), ["nonzero brings a value to the host"]),
        (lambda x, mask: x.sum().item(), ["_local_scalar_dense brings a value to the host"]),
        (lambda x, mask: x.cpu(), ["copies from cuda to cpu"]),
        (lambda x, mask: torch.zeros(3).to(x.device), ["copies from cpu to cuda"]),
        (lambda x, mask: x.copy_(torch.zeros(3, 2)), ["copies from cpu to cuda"]),
        (lambda x, mask: torch.where(mask[:, None], 0.0, x), []),
        (lambda x, mask: x.masked_fill_(mask[:, None], 0.0), []),
        (lambda x, mask: x.__setitem__(mask, 0.0), []),  # runs as masked_fill_
        (lambda x, mask: x[mask.long()].double() + torch.zeros(3, 1, device=x.device), []),
        (lambda x, mask: torch.zeros(3)[MASK.tolist()].cpu(), []),  # of no concern to the GPU
    ],
)
def test_each_kind_is_found(run: Callable[[Tensor, Tensor], object], reasons: list[str]) -> None:
    with record_syncs() as syncs:
        run(fake_cuda(torch.zeros(3, 2)), fake_cuda(MASK))
    assert [sync.reason for sync in syncs] == reasons
    assert all(sync.file == __file__ and str(sync).startswith("test_syncs.py:") for sync in syncs)


def test_a_model_moves_to_the_fake_gpu_and_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    with record_syncs() as syncs:
        fake = on_fake_cuda(model)
        assert all(tensor.is_cuda for tensor in fake.state_dict().values())
        assert fake(fake_cuda(torch.zeros(4, 3))).shape == (4, 2)
    assert not syncs
    assert model(torch.zeros(4, 3)).shape == (4, 2)
