"""What can be seen of cuBLASLt without a GPU; `test_on_gpu.py` has its products."""

from __future__ import annotations

import ctypes

import pytest
import torch

from samopt.errors import Unsupported
from samopt.passes.kernels import cublaslt


def test_a_library_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(Unsupported, match=r"libcublasLt\.so\.99 cannot be loaded"):
        cublaslt.version()


def test_a_proposal_has_the_size_that_cublaslt_writes() -> None:
    assert ctypes.sizeof(cublaslt.Proposal) == 64 + 8 + 4 + 4 + 16


def test_alignment_is_that_of_the_first_value() -> None:
    tensor = torch.empty(4096, dtype=torch.uint8)
    offset = -tensor.data_ptr() % cublaslt.ALIGNMENT
    whole = tensor[offset:]
    assert cublaslt.aligned(whole, None)
    assert not cublaslt.aligned(whole, whole[16:])
