"""What finds synchronising operations finds each kind, and nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from segment_anything.modeling import PromptEncoder
from torch import Tensor, nn

from samopt.profiling.syncs import as_imported, fake_cuda, on_fake_cuda, record_syncs

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA")

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
        (lambda x, mask: x.sum().item(), ["item brings a value to the host"]),
        (lambda x, mask: x.unique(), ["unique brings a value to the host"]),
        (
            lambda x, mask: x.repeat_interleave(mask.long(), dim=0),
            ["repeat_interleave brings the size of its result to the host"],
        ),
        (lambda x, mask: x.repeat_interleave(2, dim=0), []),
        (lambda x, mask: torch.tensor([1.0], device=x.device), ["copies from cpu to cuda"]),
        (lambda x, mask: torch.as_tensor(np.zeros(2), device=x.device), ["copies from cpu to cuda"]),
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
    assert all(sync.file == __file__ for sync in syncs)


def test_a_model_moves_to_the_fake_gpu_and_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    with record_syncs() as syncs:
        fake = on_fake_cuda(model)
        assert all(tensor.is_cuda for tensor in fake.state_dict().values())
        assert fake(fake_cuda(torch.zeros(4, 3))).shape == (4, 2)
    assert not syncs
    assert model(torch.zeros(4, 3)).shape == (4, 2)


def test_where_it_is_and_in_which_stage() -> None:
    stages = ["first"]
    with record_syncs(lambda: stages[-1]) as syncs:
        write_rows(fake_cuda(torch.zeros(3, 2)), fake_cuda(MASK))
        stages.append("second")
        parsed = fake_cuda(torch.zeros(3)).sum().item()
    assert isinstance(parsed, torch.SymFloat)
    read, written, item = syncs
    lines, first = inspect.getsourcelines(write_rows)
    assert (read.line, read.function, read.code) == (first + 1, "write_rows", lines[1].strip())
    assert replace(written, reason=read.reason) == read
    assert (read.stage, item.stage) == ("first", "second")
    assert re.fullmatch(r".*profiling/test_syncs\.py:\d+ in write_rows: reads with a boolean mask: x\[.*", str(read))


def test_files_are_named_as_python_imports_them() -> None:
    assert as_imported(inspect.getfile(PromptEncoder)) == "segment_anything/modeling/prompt_encoder.py"
    assert as_imported("<eval_with_key>.0") == "<eval_with_key>.0"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_fake_tensors_become_arrays_of_zeros(dtype: torch.dtype) -> None:
    with record_syncs() as syncs:
        array = fake_cuda(torch.ones(2, 3, dtype=dtype)).cpu().numpy()
    assert np.array_equal(array, torch.zeros(2, 3, dtype=dtype).numpy())
    assert array.dtype == torch.zeros(0, dtype=dtype).numpy().dtype
    assert [sync.reason for sync in syncs] == ["copies from cuda to cpu"]
