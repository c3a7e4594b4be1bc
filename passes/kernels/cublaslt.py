"""Matrix products by cuBLASLt's C interface, which proposes several algorithms for each where PyTorch takes the first.

cuBLASLt ranks its proposals by a model of the GPU, not by measurement: on an H200 the first of eight is up to a tenth
slower than the best. What a proposal is named here, its place among them, holds for one version of the library.

See https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api; the numbers below are those of its header.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samopt.errors import Unsupported

PROPOSALS = 8  # asked for
WORKSPACE = 32 * 2**20  # bytes that an algorithm may have: what PyTorch gives on Hopper
ALIGNMENT = 256  # bytes; what cuBLASLt takes for granted unless told otherwise

DTYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
FLOAT32, COMPUTE_FLOAT32 = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
TRANSPOSE_A, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
NO_EPILOGUE, ADD_BIAS, GELU = 1, 4, 32  # cublasLtEpilogue_t
MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t


class Proposal(ctypes.Structure):
    """An algorithm, opaque, and what it needs (cublasLtMatmulHeuristicResult_t)."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class Product:
    """y [M, N] = x [M, K] weight [N, K]^T + bias [N], or its GELU in the tanh form: of one dtype, summed in float32.

    Attributes:
        M: rows of x.
        N: outputs.
        K: inputs.
        dtype: bfloat16 or float16.
        bias: whether there is one.
        gelu: whether GELU follows.
        device: the GPU.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    bias: bool
    gelu: bool
    device: torch.device


@functools.cache
def library() -> Any:
    """cuBLASLt as PyTorch has loaded it.

    Raises:
        Unsupported: it is not there under its usual name.
    """
    name = f"libcublasLt.so.{(torch.version.cuda or '0').partition('.')[0]}"
    try:
        found = ctypes.CDLL(name)
    except OSError as error:
        raise Unsupported(f"{name} cannot be loaded: {error}") from None
    found.cublasLtGetVersion.restype = c_size_t
    return found


def version() -> int:
    """The library's, as 130100 for 13.1.0."""
    return int(library().cublasLtGetVersion())


@functools.cache
def proposals(product: Product) -> Sequence[Proposal]:
    """What cuBLASLt proposes for a product, its own favourite first; none where it knows no way."""
    asked, count = (Proposal * PROPOSALS)(), c_int()
    limit, preference = c_size_t(WORKSPACE), c_void_p()
    _check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    _check(library().cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE, ctypes.byref(limit), 8))
    with _description(product, 0) as description:
        weight, x, y = _layouts(product)
        library().cublasLtMatmulAlgoGetHeuristic(
            _handle(product.device), description, weight, x, y, y, preference, PROPOSALS, asked, ctypes.byref(count)
        )  # fails where there is none
    library().cublasLtMatmulPreferenceDestroy(preference)
    return [proposal for proposal in asked[: count.value] if proposal.state == 0]


@functools.cache
def fits(product: Product, of: Product, place: int) -> bool:
    """Whether the proposal at `place` among those for the product `of` can compute `product` too."""
    if place >= len(proposals(of)):
        return False
    checked = Proposal()
    with _description(product, 0) as description:
        weight, x, y = _layouts(product)
        status = library().cublasLtMatmulAlgoCheck(
            _handle(product.device), description, weight, x, y, y, proposals(of)[place].algorithm, ctypes.byref(checked)
        )
    return status == 0 and checked.workspace <= WORKSPACE


def aligned(*tensors: Tensor | None) -> bool:
    """Whether tensors begin where the proposals expect it."""
    return all(tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def multiply(
    product: Product, proposal: Proposal, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Computes a product by a proposal that fits it, into `out`, on the current stream. All tensors are contiguous."""
    one, zero = c_float(1), c_float(0)
    workspace = torch.empty(WORKSPACE if proposal.workspace else 0, dtype=torch.uint8, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    layouts = _layouts(product)
    with torch.cuda.device_of(x), _description(product, 0 if bias is None else bias.data_ptr()) as description:
        _check(
            library().cublasLtMatmul(
                _handle(product.device), description, ctypes.byref(one), c_void_p(weight.data_ptr()), layouts[0],
                c_void_p(x.data_ptr()), layouts[1], ctypes.byref(zero), c_void_p(out.data_ptr()), layouts[2],
                c_void_p(out.data_ptr()), layouts[2], proposal.algorithm, c_void_p(workspace.data_ptr()),
                c_size_t(workspace.numel()), c_void_p(stream),
            )
        )  # fmt: skip
    return out


@functools.cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)))
    return handle


@contextmanager
def _description(product: Product, bias: int) -> Iterator[c_void_p]:
    """What is computed, with the bias's address: of a call's own, so that threads do not share it.

    To cuBLASLt matrices lie column by column: it computes y^T = weight x^T, whose rows are the outputs.
    """
    description = c_void_p()
    _check(library().cublasLtMatmulDescCreate(ctypes.byref(description), COMPUTE_FLOAT32, FLOAT32))
    epilogue = (ADD_BIAS if product.bias else 0) | (GELU if product.gelu else 0)
    try:
        for attribute, value in (
            (TRANSPOSE_A, c_int32(1)),
            (EPILOGUE, c_uint32(epilogue or NO_EPILOGUE)),
            *([(BIAS_POINTER, c_void_p(bias))] if product.bias else []),
        ):
            size = c_size_t(ctypes.sizeof(value))
            _check(library().cublasLtMatmulDescSetAttribute(description, attribute, ctypes.byref(value), size))
        yield description
    finally:
        library().cublasLtMatmulDescDestroy(description)


@functools.cache
def _layouts(product: Product) -> tuple[c_void_p, c_void_p, c_void_p]:
    """Of weight, x and y."""
    M, N, K = product.M, product.N, product.K

    def layout(rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        _check(library().cublasLtMatrixLayoutCreate(ctypes.byref(made), DTYPES[product.dtype], *sizes))
        return made

    return layout(K, N), layout(K, M), layout(N, M)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
