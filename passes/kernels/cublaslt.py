"""Matrix products by cuBLASLt's C interface, which proposes several algorithms for each where PyTorch takes the first.

cuBLASLt ranks its proposals by a model of the GPU, not by measurement: on an H200 the first of eight takes up to a
quarter more time than the best. What a proposal is named here, its place among them, holds for one version of the
library.

See https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api; the numbers below are those of its header.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samopt.errors import Unsupported, first_line

PROPOSALS = 32  # asked for
WORKSPACE = 32 * 2**20  # bytes that an algorithm may have: what PyTorch gives on Hopper
ALIGNMENT = 256  # bytes; what cuBLASLt takes for granted unless told otherwise

DTYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
FLOAT32, COMPUTE_FLOAT32 = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
TRANSPOSE_A, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
NO_EPILOGUE, ADD_BIAS, GELU = 1, 4, 32  # cublasLtEpilogue_t
MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
REDUCTION = 3  # cublasLtMatmulAlgoConfigAttributes_t
IN_FLOAT32 = (0, 2)  # cublasLtReductionScheme_t: not split, or partial sums in the type that is computed in


class Refused(RuntimeError):
    """cuBLASLt failed, with its status."""


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


def library() -> Any:
    """cuBLASLt as PyTorch has loaded it.

    Raises:
        Unsupported: it is not there under its usual name.
    """
    name = f"libcublasLt.so.{(torch.version.cuda or '0').partition('.')[0]}"
    found = _loaded(name)
    if isinstance(found, str):
        raise Unsupported(f"{name} cannot be loaded: {found}")
    return found


@functools.cache
def _loaded(name: str) -> Any:
    """The library, or why there is none."""
    try:
        found = ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    pointer, size = c_void_p, c_size_t
    found.cublasLtGetVersion.restype = size
    for function, arguments in {
        "Create": [pointer],
        "MatmulDescCreate": [pointer, c_int, c_int],
        "MatmulDescSetAttribute": [pointer, c_int, pointer, size],
        "MatmulDescDestroy": [pointer],
        "MatrixLayoutCreate": [pointer, c_int, c_uint64, c_uint64, c_int64],
        "MatrixLayoutDestroy": [pointer],
        "MatmulPreferenceCreate": [pointer],
        "MatmulPreferenceSetAttribute": [pointer, c_int, pointer, size],
        "MatmulPreferenceDestroy": [pointer],
        "MatmulAlgoGetHeuristic": [pointer] * 7 + [c_int, pointer, pointer],
        "MatmulAlgoCheck": [pointer] * 8,
        "MatmulAlgoConfigGetAttribute": [pointer, c_int, pointer, size, pointer],
        # handle, description, alpha, A and layout, B and layout, beta, C and layout, D and layout, algorithm, workspace
        "Matmul": [pointer] * 14 + [size, pointer],
    }.items():
        getattr(found, f"cublasLt{function}").argtypes = arguments
    return found


def version() -> int:
    """The library's, as 130100 for 13.1.0."""
    return int(library().cublasLtGetVersion())


@functools.cache
def handle(device: torch.device) -> c_void_p:
    """The library's handle for a GPU, made once.

    Raises:
        Unsupported: it is to be made while a CUDA graph is captured, when nothing can be allocated.
        Refused: there is no memory for it.
    """
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported("cuBLASLt cannot be set up while a CUDA graph is captured")
    made = c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(byref(made)))
    return made


def unavailable(device: torch.device) -> str | None:
    """Why there are no products by cuBLASLt on a device, or None if there are."""
    if device.type != "cuda":
        return "cuBLASLt needs a GPU"
    try:
        handle(device)
    except (Unsupported, Refused) as failure:
        return first_line(failure)
    return None


@functools.lru_cache(4096)
def proposals(product: Product) -> Sequence[Proposal]:
    """What cuBLASLt proposes for a product, its own favourite first; none where it knows no way."""
    asked, count = (Proposal * PROPOSALS)(), c_int()
    limit, preference = c_size_t(WORKSPACE), c_void_p()
    lt = library()
    with torch.cuda.device(product.device), _described(product, 0) as (description, layouts):
        _check(lt.cublasLtMatmulPreferenceCreate(byref(preference)))
        try:
            _check(lt.cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE, byref(limit), sizeof(limit)))
            lt.cublasLtMatmulAlgoGetHeuristic(
                handle(product.device), description, *layouts, layouts[2], preference, PROPOSALS, asked, byref(count)
            )  # fails where there is none
        finally:
            lt.cublasLtMatmulPreferenceDestroy(preference)
    return [proposal for proposal in asked[: count.value] if proposal.state == 0]


@functools.lru_cache(4096)
def workspace_for(product: Product, of: Product, place: int) -> int | None:
    """The bytes that the proposal at `place` among those for the product `of` takes to compute `product`; None where it
    cannot, or would not sum in float32."""
    if place >= len(proposals(of)):
        return None
    algorithm, checked, scheme, written = proposals(of)[place].algorithm, Proposal(), c_uint32(), c_size_t()
    lt = library()
    # Where it does not tell, the sum is not split: 0.
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, REDUCTION, byref(scheme), sizeof(scheme), byref(written))
    with torch.cuda.device(product.device), _described(product, 0) as (description, layouts):
        status = lt.cublasLtMatmulAlgoCheck(
            handle(product.device), description, *layouts, layouts[2], algorithm, byref(checked)
        )
    fits = status == 0 and checked.workspace <= WORKSPACE and scheme.value in IN_FLOAT32
    return int(checked.workspace) if fits else None


def aligned(*tensors: Tensor | None) -> bool:
    """Whether tensors begin where the proposals expect it."""
    return all(tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def multiply(
    product: Product, algorithm: Any, workspace: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Computes a product into `out` on the current stream. All tensors are contiguous, of its dtype and on its GPU.

    Args:
        product: what is computed.
        algorithm: of a proposal that can compute it.
        workspace: the bytes that it takes for that.
        x: [..., K].
        weight: [N, K].
        bias: [N], or None.
        out: [..., N].

    Raises:
        Refused: the library did.
    """
    one, zero = c_float(1), c_float(0)
    memory = torch.empty(workspace, dtype=torch.uint8, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with (
        torch.cuda.device_of(x),
        _described(product, 0 if bias is None else bias.data_ptr()) as (description, (of_weight, of_x, of_y)),
    ):
        _check(
            library().cublasLtMatmul(
                handle(product.device), description,
                byref(one), weight.data_ptr(), of_weight, x.data_ptr(), of_x,
                byref(zero), out.data_ptr(), of_y, out.data_ptr(), of_y,
                algorithm, memory.data_ptr(), workspace, stream,
            )
        )  # fmt: skip
    return out


@contextmanager
def _described(product: Product, bias: int) -> Iterator[tuple[c_void_p, tuple[c_void_p, ...]]]:
    """What is computed, with the bias's address, and the layouts of weight, x and y: of a call's own, so that threads
    do not share them.

    To cuBLASLt matrices lie column by column: it computes y^T = weight x^T, whose rows are the outputs.
    """
    lt, description, layouts = library(), c_void_p(), (c_void_p(), c_void_p(), c_void_p())
    M, N, K = product.M, product.N, product.K
    epilogue = (ADD_BIAS if product.bias else 0) | (GELU if product.gelu else 0)
    attributes: list[tuple[int, Any]] = [(TRANSPOSE_A, c_int32(1)), (EPILOGUE, c_uint32(epilogue or NO_EPILOGUE))]
    if product.bias:
        attributes.append((BIAS_POINTER, c_void_p(bias)))
    try:
        _check(lt.cublasLtMatmulDescCreate(byref(description), COMPUTE_FLOAT32, FLOAT32))
        for attribute, value in attributes:
            _check(lt.cublasLtMatmulDescSetAttribute(description, attribute, byref(value), sizeof(value)))
        for layout, (rows, columns) in zip(layouts, ((K, N), (K, M), (N, M)), strict=True):
            _check(lt.cublasLtMatrixLayoutCreate(byref(layout), DTYPES[product.dtype], rows, columns, rows))
        yield description, layouts
    finally:
        for layout in layouts:
            if layout:
                lt.cublasLtMatrixLayoutDestroy(layout)
        if description:
            lt.cublasLtMatmulDescDestroy(description)


def _check(status: int) -> None:
    if status:
        raise Refused(f"cuBLASLt failed with status {status}")
