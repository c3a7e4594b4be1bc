"""Image tokens attend to a prompt's few tokens and are normed, as one operator: `torch.ops.samopt.image_to_token`.

It is the last step of the mask decoder's layers. On a GPU it is a Triton kernel in half precision, which reads and
writes every image token once (see `token_attention`); on a CPU, and for what the kernel does not take, plain PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samopt.errors import Unsupported
from samopt.passes.kernels.arithmetic import LOG2E, power_of_two
from samopt.passes.kernels.devices import HALVES
from samopt.passes.kernels.tuning import Config, Problem, choose

SOURCES = ("image_to_token", "token_attention")
MOST_TOKENS = 64  # of a prompt: more would not stay in registers
LEAST = 16  # rows or columns that a product on the matrix units takes
WIDEST = 512
EPS = 1e-5  # of made-up problems
FEW, MANY = 1, 32  # prompts that configurations are chosen for
# Two programs a multiprocessor, one a block; then many blocks a program, the next of them on its way; and what takes
# little memory, for other GPUs.
CANDIDATES = (
    Config.of(BLOCK_M=64, STEPS=1, GROUP=64, num_warps=4, num_stages=1),
    Config.of(BLOCK_M=64, STEPS=1, GROUP=128, num_warps=4, num_stages=1),
    Config.of(BLOCK_M=64, STEPS=1, GROUP=64, num_warps=8, num_stages=1),
    Config.of(BLOCK_M=128, STEPS=1, GROUP=64, num_warps=8, num_stages=1),
    Config.of(BLOCK_M=64, STEPS=4, GROUP=64, num_warps=4, num_stages=2),
    Config.of(BLOCK_M=64, STEPS=8, GROUP=64, num_warps=4, num_stages=2),
    Config.of(BLOCK_M=64, STEPS=4, GROUP=128, num_warps=8, num_stages=1),
    Config.of(BLOCK_M=128, STEPS=4, GROUP=64, num_warps=8, num_stages=1),
    Config.of(BLOCK_M=32, STEPS=1, GROUP=64, num_warps=4, num_stages=1),
    Config.of(BLOCK_M=32, STEPS=4, GROUP=64, num_warps=4, num_stages=2),
)


class Inputs(NamedTuple):
    """The tensors that the operator takes, see there."""

    keys: Tensor
    key_pe: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor
    q_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor

    @property
    def batch(self) -> int:
        """The number of results: that of images, of positions, or of prompts, each of which may be one for all."""
        sides = self.keys.shape[0], self.key_pe.shape[0], self.k.shape[0]
        return next((size for size in sides if size != 1), 1)


@torch.library.custom_op("samopt::image_to_token", mutates_args=(), device_types="cpu")
def image_to_token(
    keys: Tensor,
    key_pe: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    q_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    heads: int,
    eps: float,
) -> Tensor:
    """layer_norm(keys + out_proj(attention(q_proj(keys + key_pe), k, v))), all of one dtype.

    Args:
        keys: the image tokens, [N, M, C], or [1, M, C] where they are the same for all prompts.
        key_pe: their positions, [N, M, C] or [1, M, C].
        k: the prompts' tokens as keys, projected, [N, T, I]; of one prompt for all images, [1, T, I].
        v: likewise as values.
        q_weight: of the image tokens' projection, [I, C].
        q_bias: [I].
        out_weight: of the projection of what they attend to, [C, I].
        out_bias: [C].
        norm_weight: [C].
        norm_bias: [C].
        heads: their number, one after the other in I.
        eps: added to the variance.

    Returns:
        [N, M, C], contiguous.
    """
    given = Inputs(keys, key_pe, k, v, q_weight, q_bias, out_weight, out_bias, norm_weight, norm_bias)
    return by_pytorch(Inputs(*(tensor.float() for tensor in given)), heads, eps).to(keys.dtype)


@image_to_token.register_fake
def _fake(*arguments: Any) -> Tensor:
    given = Inputs(*arguments[:-2])
    return given.keys.new_empty((given.batch, *given.keys.shape[1:]))


@image_to_token.register_kernel("cuda")
def _cuda(*arguments: Any) -> Tensor:
    *tensors, heads, eps = arguments
    given = Inputs(*tensors)
    keys, (_, M, C), T = given.keys, given.keys.shape, given.k.shape[1]
    if keys.dtype in HALVES and 0 < T <= MOST_TOKENS and given.batch * M and not unfit(C, heads):
        try:
            config = choose(problem(given.batch, M, C, heads, T, keys.dtype, keys.device))
        except Unsupported:  # a graph captured before a first run: what follows is as right, and slower
            pass
        else:
            return launch(config, given, heads, eps)
    return by_pytorch(given, heads, eps)


def unfit(C: int, heads: int) -> str | None:
    """Why the kernel cannot take tokens of `C` channels, or so many heads; None if it can."""
    if power_of_two(C, LEAST) != C or C > WIDEST:
        return f"its tokens have {C} channels, which is no power of two from {LEAST} to {WIDEST}"
    return None if power_of_two(heads) == heads else f"its {heads} heads are no power of two"


def by_pytorch(given: Inputs, heads: int, eps: float) -> Tensor:
    """The same in PyTorch, in the dtype of the tensors."""
    keys, key_pe, k, v, q_weight, q_bias, out_weight, out_bias, norm_weight, norm_bias = given
    q = F.linear(keys + key_pe, q_weight, q_bias)
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2).expand(given.batch, -1, -1, -1) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    total = keys + F.linear(attended, out_weight, out_bias)
    return F.layer_norm(total, norm_weight.shape, norm_weight, norm_bias, eps).contiguous()


def launch(config: Config, given: Inputs, heads: int, eps: float, out: Tensor | None = None) -> Tensor:
    """Runs the kernels with a configuration; see `image_to_token` for the tensors."""
    from samopt.passes.kernels.token_attention import token_attention, token_attention_terms

    given = Inputs(*(tensor.contiguous() for tensor in given))
    keys, key_pe, k, v, *projections, norm_weight, norm_bias = given
    (_, M, C), (prompts, tokens, inner), batch = keys.shape, k.shape, given.batch
    T = padded(tokens, heads)
    columns = heads * T
    options = config.launch_options()
    options["GROUP"] = max(min(options["GROUP"], columns), T)
    scale = (inner // heads) ** -0.5 * LOG2E
    if out is None:
        out = keys.new_empty((batch, M, C))
    queries, answers = keys.new_empty((2, prompts, columns, C))
    offsets = keys.new_empty((prompts, columns), dtype=torch.float32)
    strides = [0 if len(side) == 1 else M * C for side in (keys, key_pe)]
    with torch.cuda.device_of(keys):  # Triton launches on the current GPU, wherever the tensors are
        token_attention_terms[(prompts * heads,)](
            k, v, *projections, queries, offsets, answers, tokens, scale, heads, inner // heads, T, C,
            num_warps=max(T // 4, 4),
        )  # fmt: skip
        token_attention[(batch * -(-M // (options["BLOCK_M"] * options["STEPS"])),)](
            keys, key_pe, queries, offsets, answers, norm_weight, norm_bias, out, *strides,
            0 if prompts == 1 else columns, M, eps, columns, T, C, STAGES=config.num_stages, **options,
        )  # fmt: skip
    return out


def padded(tokens: int, heads: int) -> int:
    """What a prompt's tokens are padded to: all heads together make a product for the matrix units."""
    return power_of_two(tokens, max(LEAST // 2, LEAST // heads))


def problem(prompts: int, M: int, C: int, heads: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """What `choose` needs to find the best configuration: random inputs, made when asked for.

    Args:
        prompts: their number; configurations are chosen for few and for many.
        M: image tokens.
        C: their channels.
        heads: number of heads.
        tokens: of a prompt; they stand for as many as they are padded to.
        dtype: of everything.
        device: the GPU.
    """
    N, T, inner = FEW if prompts < MANY // 4 else MANY, padded(tokens, heads), C // 2

    @functools.cache
    def inputs() -> Inputs:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)

        projections = normal(inner, C, std=C**-0.5), normal(inner), normal(C, inner, std=inner**-0.5), normal(C)
        tensors = normal(N, M, C), normal(1, M, C), normal(N, T, inner), normal(N, T, inner)
        return Inputs(*tensors, *projections, normal(C), normal(C))

    return Problem(
        kernel="image_to_token",
        shape=(("prompts", N), ("M", M), ("C", C), ("heads", heads), ("T", T)),
        dtype=dtype,
        device=device,
        sources=SOURCES,
        candidates=CANDIDATES,
        output=lambda: torch.empty((N, M, C), dtype=dtype, device=device),
        run=lambda config, out: launch(config, inputs(), heads, EPS, out),
        reference=lambda: by_pytorch(Inputs(*(tensor.float() for tensor in inputs())), heads, EPS),
    )
