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
    (N, K), given = weight.shape, [x, weight] if bias is None else [x, weight, bias]
    alike = all((tensor.dtype, tensor.device) == (x.dtype, x.device) for tensor in given)
    fitting = x.shape[-1] == K and (bias is None or bias.shape == (N,))
    if not alike or not fitting or x.dtype not in cublaslt.DTYPES or x.numel() == 0:  # what does not fit, PyTorch says
        y = F.linear(x, weight, bias)
        return F.gelu(y) if gelu else y
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty((*x.shape[:-1], N))
    product = Product(x.numel() // K, N, K, x.dtype, bias is not None, gelu, x.device)
    tuned = dataclasses.replace(product, M=rows_of(product.M))
    try:
        config = choose(problem(tuned))
        proposal = dict(config.blocks)["PROPOSAL"]
        if config != PYTORCH and cublaslt.aligned(x, weight, bias, out):
            workspace = cublaslt.workspace_for(product, tuned, proposal)
            if workspace is not None:
                algorithm = cublaslt.proposals(tuned)[proposal].algorithm
                return cublaslt.multiply(product, algorithm, workspace, x, weight, bias, out)
    except (Unsupported, cublaslt.Refused):  # no such library, or nothing can be sought now: in a capture, for one
        pass
    return _by_pytorch(x, weight, bias, gelu, out)


def _by_pytorch(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, out: Tensor) -> Tensor:
    """The same into `out`, GELU in the tanh form."""
    rows, y = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=y)
        if gelu:
            torch.ops.aten.gelu_(y, approximate="tanh")
    elif gelu:
        torch._addmm_activation(bias, rows, weight.t(), use_gelu=True, out=y)
    else:
        torch.addmm(bias, rows, weight.t(), out=y)
    return out


def rows_of(M: int) -> int:
    """The rows of the product that stands for M of them: algorithms are chosen for a power of two up to 32,768."""
    return min(max(1 << (M - 1).bit_length(), FEWEST_ROWS), MOST_ROWS)


def problem(product: Product) -> Problem:
    """What `choose` needs to find the fastest proposal: random inputs, made when asked for.

    Raises:
        Unsupported: cuBLASLt cannot be loaded, or set up now.
        cublaslt.Refused: it has no memory for its handle.
    """
    M, N, K = product.M, product.N, product.K
    library_version = cublaslt.version()
    cublaslt.handle(product.device)

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
        proposal = dict(config.blocks)["PROPOSAL"]
        if (workspace := cublaslt.workspace_for(product, product, proposal)) is None:
            raise Unsupported("cuBLASLt proposes no such algorithm, or none that sums in float32")
        cublaslt.multiply(product, cublaslt.proposals(product)[proposal].algorithm, workspace, *inputs(), out)

    def reference() -> Tensor:
        x, weight, bias = inputs()
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return F.gelu(y, approximate="tanh") if product.gelu else y

    return Problem(
        kernel="linear",
        shape=(
            *(("M", M), ("N", N), ("K", K), ("bias", int(product.bias)), ("gelu", int(product.gelu))),
            ("cublasLt", library_version),
        ),
        dtype=product.dtype,
        device=product.device,
        sources=SOURCES,
        candidates=CANDIDATES,
        output=lambda: torch.empty((M, N), dtype=product.dtype, device=product.device),
        run=run,
        reference=reference,
    )
