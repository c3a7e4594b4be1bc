"""Linear layers with 2:4 sparse weights: two of every four are zero, and sparse tensor cores skip them.

Where this GPU's 2:4 product is not faster, or there is none, the sparse weight stays in the ordinary product: the
accuracy is that of a sparse model, the speed is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samopt.base import Numerics, Pass, Phase
from samopt.errors import Unsupported
from samopt.passes import tuned_linear
from samopt.passes.calibration import input_moments
from samopt.passes.kernels.semi_sparse import MULTIPLES, cannot_multiply, compress, fastest, product, unfit
from samopt.passes.linears import linears, refuse_none
from samopt.passes.two_four import BLOCK, Criterion, is_two_four, two_four
from samopt.rebind import bound, clone, rebind
from samopt.result import Site, Skip
from samopt.samples import Sample

PARTS = ("_samopt_compressed", "_samopt_positions")  # buffers: the weight in its kernel's form, in one part or two
KERNEL = "_samopt_kernel"


@dataclass(frozen=True)
class SemiSparse(Pass):
    """Makes linear layers 2:4 sparse: two zeros in every four weights of a row.

    The weight keeps its key, shape and dtype. Weights loaded into the rewritten model are taken as they are where they
    are 2:4 already; of others, the two smallest of every four become zero, as there is nothing to calibrate with: undo
    the pass, load, and apply it again for more.

    With `kernel="auto"` a layer stays in the ordinary, dense product where no 2:4 kernel is faster on this GPU, where
    there is no such GPU, and where another pass put its own product; its site then says `emulated`, and why. The model
    is to be on the GPU already: each kernel's result is checked, and timed, when `match` looks.

    Attributes:
        layers: roles or names of the layers, see `samopt.passes.linears.linears`.
        criterion: which weights stay: those of greatest "magnitude"; those that add most to the output on the samples
            ("activation"); or those whose loss the others can make up for least ("compensation").
        update: fit the weights that stay to what the layer computed on the samples before.
        kernel: what computes the product.
    """

    layers: tuple[str, ...] = ("qkv", "proj", "lin1", "lin2")
    criterion: Criterion = "compensation"
    update: bool = True
    kernel: Literal["auto", "dense", "cusparselt", "cutlass"] = "auto"

    phase: ClassVar[Phase] = Phase.SPARSIFY
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_none("SemiSparse", self.layers)

    def requires(self, model: nn.Module) -> None:
        """Raises Unsupported where a kernel is asked for by name that cannot run."""
        if self.kernel in MULTIPLES and (reason := cannot_multiply(next(model.parameters()).device)):
            raise Unsupported(reason, 'kernel="auto" or "dense" makes the same weights without it')

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        """Yields the linear layers; those whose rows do not split into fours are Skips."""
        for found in linears(model, self.layers):
            if isinstance(found, Skip):
                yield found
                continue
            fqn, module = found
            if module.in_features % BLOCK:
                yield Skip(fqn, f"the sparsifier needs in_features to be a multiple of 4, not {module.in_features}")
            else:
                yield Site(fqn, self._facts(module))

    def _facts(self, module: nn.Module) -> dict[str, Any]:
        kernel, why = self._kernel_for(module)
        return {"kernel": kernel, **({"emulated": True} if kernel == "dense" else {}), "why": why}

    def _kernel_for(self, module: Any) -> tuple[str, str]:
        if self.kernel == "dense":
            return "dense", "it was asked for"
        if reason := cannot_multiply(module.weight.device):
            return "dense", reason
        if self.kernel == "auto" and bound(module, "forward") not in (None, tuned_linear.forward):
            return "dense", "another pass computes the product"
        return fastest(module.weight, list(MULTIPLES) if self.kernel == "auto" else [self.kernel])

    def calibrate(
        self, model: nn.Module, sites: Sequence[Site], samples: Sequence[Sample] | None
    ) -> Mapping[str, Tensor]:
        """The new weights by the layers' names, made as soon as a layer's moments are known.

        The samples are the user's, on which accuracy is measured too; without any, scenes are drawn, and others there.
        """
        old: dict[str, Any] = {site.fqn: model.get_submodule(site.fqn).weight for site in sites}
        if (self.criterion == "magnitude" and not self.update) or any(weight.is_meta for weight in old.values()):
            return {fqn: two_four(weight) for fqn, weight in old.items()}
        crossed = self.update or self.criterion == "compensation"
        moments = input_moments(model, list(old), samples, crossed=crossed)
        return {fqn: two_four(old[fqn], of, self.criterion, self.update) for fqn, of in moments}

    def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
        new: Any = clone(module)
        new.weight = nn.Parameter(stats[site.fqn], requires_grad=new.weight.requires_grad)
        assert new.weight.is_meta or is_two_four(new.weight), site.fqn
        new.register_load_state_dict_pre_hook(sparsify_loaded)
        rebind(new, "extra_repr", describe)
        if (kernel := site.facts["kernel"]) != "dense":
            vars(new)[KERNEL] = kernel
            for name in PARTS:
                new.register_buffer(name, None, persistent=False)
            compress_weight(new)
            new.register_load_state_dict_post_hook(compress_weight)
            rebind(new, "forward", linear)
            rebind(new, "_apply", apply_and_compress)
        return new


def sparsify_loaded(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Puts a 2:4 weight in the place of one that is none, in the copy that `load_state_dict` made of its argument."""
    weight = state_dict.get(f"{prefix}weight")
    if isinstance(weight, Tensor) and weight.shape == module.weight.shape and not weight.is_meta:
        state_dict[f"{prefix}weight"] = weight if is_two_four(weight) else two_four(weight)


@torch.no_grad()
def compress_weight(module: Any, incompatible_keys: Any = None) -> None:
    """Compresses a layer's weight, at first and when another was loaded, or it was moved or cast.

    In place, so that compiled code and CUDA graphs see it, unless its dtype or device is another now. One that the
    kernel cannot take, on a CPU say, leaves the layer to the dense product.
    """
    kernel, weight = getattr(module, KERNEL), module.weight
    refused = cannot_multiply(weight.device) or unfit(weight, kernel)
    for name, new in itertools.zip_longest(PARTS, () if refused else compress(weight.detach(), kernel)):
        old = getattr(module, name)
        if old is None or new is None or (old.dtype, old.device, old.shape) != (new.dtype, new.device, new.shape):
            setattr(module, name, new)
        else:
            old.copy_(new)


def apply_and_compress(module: Any, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """`nn.Module._apply`, by which `.to(...)` works: what a kernel has compressed cannot be moved or cast itself."""
    nn.Module._apply(module, function, recurse)
    compress_weight(module)
    return module


def describe(self: Any) -> str:
    """What `print` shows of a layer."""
    kernel = f" by {getattr(self, KERNEL)}" if hasattr(self, KERNEL) else ""
    return f"{type(self).extra_repr(self)}, 2:4 sparse{kernel}"


def linear(self: Any, x: Tensor, gelu: bool = False) -> Tensor:
    """x W^T + b for x [..., K] with the compressed weight, or its GELU, as `LinearGELU` asks its `lin1`: [..., N]."""
    parts = [part for name in PARTS if (part := getattr(self, name)) is not None]
    if parts and x.numel():
        y = product(x.to(self.weight.dtype), parts, self.bias)  # under autocast, a norm gives float32
    else:
        y = F.linear(x, self.weight, self.bias)
    return F.gelu(y) if gelu else y
