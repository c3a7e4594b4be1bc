"""x W^T + b, or the GELU of it, as one operator: `torch.ops.samopt.linear`.

On a GPU it is cuBLASLt's product in half precision, by the algorithm that was found to be the fastest (see `cublaslt`),
with the activation in its epilogue: the widest tensor of the model is so written once and not read and written again.
The epilogue has the tanh form of GELU (arXiv:1606.08415, section 2),

    0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))),

which differs from x * Phi(x) by 4.8e-4 at most: less than bfloat16 rounds values from 0.25 up, and more than float16
does. On a CPU, and in float32, it is PyTorch's product and the exact form.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels import cublaslt
from samopt.passes.kernels.cublaslt import Product
from samopt.passes.kernels.tuning import Config, Problem, choose

SOURCES = ("cublaslt", "linear")
PYTORCH = Config.of(PROPOSAL=-1)  # its own call of cuBLASLt, by the first proposal
CANDIDATES = (PYTORCH, *(Config.of(PROPOSAL=proposal) for proposal in range(cublaslt.PROPOSALS)))
FEWEST_ROWS, MOST_ROWS = 128, 32768


@torch.library.custom_op("samopt::linear", mutates_args=(), device_types="cpu")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """A linear layer, or GELU of it.

    Args:
        x: [..., K].
        weight: [N, K], in the dtype of x.
        bias: [N], likewise, or None.
        gelu: whether GELU follows.

    Returns:
        [..., N] in the dtype of x, contiguous.
    """
    y = F.linear(x, weight, bias)
    return F.gelu(y) if gelu else y


@linear.register_fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@linear.register_kernel("cuda")
def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    if x.dtype not in cublaslt.DTYPES or x.numel() == 0:
        y = F.linear(x, weight, bias)
        return F.gelu(y) if gelu else y
    x, weight = x.contiguous(), weight.contiguous()
    (N, K), M = weight.shape, x.numel() // x.shape[-1]
    out = x.new_empty((*x.shape[:-1], N))
    product = Product(M, N, K, x.dtype, bias is not None, gelu, x.device)
    tuned = dataclasses.replace(product, M=rows_of(M))
    try:
        config = choose(problem(tuned))
    except Unsupported:  # a graph captured before a first run, or no such library
        config = PYTORCH
    proposal = dict(config.blocks)["PROPOSAL"]
    if config != PYTORCH and cublaslt.aligned(x, weight, bias, out) and cublaslt.fits(product, tuned, proposal):
        return cublaslt.multiply(product, cublaslt.proposals(tuned)[proposal], x, weight, bias, out)
    return _by_pytorch(x, weight, bias, gelu, out)


def _by_pytorch(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> Tensor:
    """The same into `out`, GELU in the tanh form."""
    rows, y = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=y)
    elif gelu:
        torch._addmm_activation(bias, rows, weight.t(), use_gelu=True, out=y)
    else:
        torch.addmm(bias, rows, weight.t(), out=y)
    return F.gelu(out, approximate="tanh") if gelu and bias is None else out


def rows_of(M: int) -> int:
    """The rows of the product that stands for M of them: algorithms are chosen for a power of two up to 32,768."""
    return min(max(1 << (M - 1).bit_length(), FEWEST_ROWS), MOST_ROWS)


def problem(product: Product) -> Problem:
    """What `choose` needs to find the fastest proposal: random inputs, made when asked for.

    Raises:
        Unsupported: cuBLASLt cannot be loaded.
    """
    M, N, K = product.M, product.N, product.K

    @functools.cache
    def inputs() -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator(product.device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, device=product.device)
            return (drawn * std).to(product.dtype)

        return normal(M, K), normal(N, K, std=K**-0.5), normal(N) if product.bias else None

    def run(config: Config, out: Tensor) -> None:
        if config == PYTORCH:
            _by_pytorch(*inputs(), product.gelu, out)
            return
        known, proposal = cublaslt.proposals(product), dict(config.blocks)["PROPOSAL"]
        if proposal >= len(known):
            raise Unsupported(f"cuBLASLt proposes {len(known)} algorithms")
        cublaslt.multiply(product, known[proposal], *inputs(), out)

    def reference() -> Tensor:
        x, weight, bias = inputs()
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return F.gelu(y, approximate="tanh") if product.gelu else y

    return Problem(
        kernel="linear",
        shape=(
            *(("M", M), ("N", N), ("K", K), ("bias", int(product.bias)), ("gelu", int(product.gelu))),
            ("cublasLt", cublaslt.version()),
        ),
        dtype=product.dtype,
        device=product.device,
        sources=SOURCES,
        candidates=CANDIDATES,
        output=lambda: torch.empty((M, N), dtype=product.dtype, device=product.device),
        run=run,
        reference=reference,
    )
