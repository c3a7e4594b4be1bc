"""What the time of a call goes to: its kernels, or on a CPU its operators, in groups that have names.

A kernel is known by its name alone: those of ATen, cuBLAS, cuDNN and CUTLASS, those of samopt, those that TorchInductor
names after what it fused, and on a CPU ATen's operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType

GROUPS = ("attention", "matmul", "convolution", "normalisation", "elementwise", "copies", "other")

_FUSED = r"(triton_(poi|per|red|mix|for)|cpp)_fused_"
_MOVES = (
    "_to_copy cat clone constant_pad_nd copy expand permute select slice transpose unbind _unsafe_view unsqueeze view _"
)
_ARITHMETIC = (
    "abs add addcdiv addcmul all any clamp cos cumsum div eq erf exp floor ge gelu gt le log logical_and logical_not "
    "logical_or lt masked_fill max maximum mean min minimum mul ne neg pow reciprocal relu round rsqrt rsub sigmoid "
    "sin sqrt sub sum tanh where"
)


def _any(words: str) -> str:
    return f"({'|'.join(words.split())})"


# The first rule that is found in a name says its group.
RULES: tuple[tuple[str, str], ...] = (
    # What TorchInductor fused is named after all that is in it; templates, after the product they are one of.
    ("attention", r"triton_tem_fused_.*attention"),
    ("convolution", r"triton_tem_fused_.*convolution"),
    ("matmul", r"triton_tem_fused_"),
    ("normalisation", rf"{_FUSED}.*(_norm|var_mean)"),
    ("attention", rf"{_FUSED}.*_softmax"),
    ("copies", rf"{_FUSED}{_any(_MOVES)}+\d*$"),
    ("elementwise", _FUSED),
    # Softmax is attention: nothing else in SAM has one.
    ("attention", r"(?i)attention|attn|flash|fmha|sdpa|softmax|position_terms|image_to_token"),
    ("copies", r"(?i)nchwtonhwc|nhwctonchw|im2col|col2im"),
    ("convolution", r"(?i)convolution|conv\dd|conv_|_conv|convolve|[fw]prop|[dw]grad|winograd"),
    ("normalisation", r"(?i)(layer|batch|group|rms|row)_?norm|rowwisemoments"),
    ("matmul", r"(?i)gemm|gemv|nvjet|cutlass|cublas|splitk|matmul|addmm|addmv|bmm|_linear|samopt::linear|float8_gelu"),
    ("matmul", r"_mm\b|^aten::(mm|mv|dot|linear|einsum)\b"),
    ("copies", r"(?i)memcpy|memset|copy|catarray|index_|_index|gather|scatter|fillfunctor|pad_nd|transpose_kernel"),
    ("copies", r"^aten::(cat|clone|contiguous|index|fill_|zero_|repeat)\b"),
    ("elementwise", r"(?i)elementwise|reduce_kernel|residual_sum|row_quantize|quantize_rows"),
    ("elementwise", rf"^aten::{_any(_ARITHMETIC)}_?$"),
)
_COMPILED = tuple((group, re.compile(rule)) for group, rule in RULES)
_MADE_FOR = re.compile(
    r"CUDAFunctor_(\w+)|\b([A-Z]\w*?)Functor\b|\b(\w+?)_kernel_(?:cuda|impl)\b|\b([A-Z]\w*?)CUDAKernelImpl\b|\b(cutlass\w+)"
)


def group_of(name: str) -> str:
    """The group, one of GROUPS, of a kernel or operator."""
    return next((group for group, rule in _COMPILED if rule.search(name)), "other")


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel, or operator, in a call.

    Attributes:
        name: as the profiler gives it.
        group: one of GROUPS.
        seconds: all runs together, of an operator without what it calls.
        calls: how many runs.
    """

    name: str
    group: str
    seconds: float
    calls: int

    @property
    def short(self) -> str:
        """The name without return type, namespaces, arguments, template; with what a general kernel is made for."""
        if not self.name.startswith("void ") and "<" not in self.name:
            return self.name
        name = re.sub(r"\b\w+::(?=\w)", "", self.name.replace("(anonymous namespace)::", "").removeprefix("void "))
        plain, _, template = name.partition("<")
        plain = plain.partition("(")[0]
        made_for = _MADE_FOR.findall(template)
        if not made_for:
            return plain
        (*_, last) = made_for
        return f"{plain} ({next(filter(None, last))})"


def kernels_of(averages: Iterable[Any], cuda: bool) -> tuple[Kernel, ...]:
    """The kernels in what `profile.key_averages()` returned, longest first.

    Args:
        averages: its rows.
        cuda: whether to take what ran on the GPU; otherwise, what ran on the CPU.
    """
    device = DeviceType.CUDA if cuda else DeviceType.CPU
    found = []
    for row in averages:
        if row.device_type == device and not row.is_user_annotation and not row.key.startswith("ProfilerStep"):
            microseconds = row.self_device_time_total if cuda else row.self_cpu_time_total
            found.append(Kernel(row.key, group_of(row.key), microseconds / 1e6, row.count))
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))


@dataclass(frozen=True)
class GroupTime:
    """A group's part in a call.

    Attributes:
        group: one of GROUPS.
        seconds: of all its kernels.
        share: of the seconds of all groups.
        calls: how many kernels ran.
        names: its kernels that took longest, in short, up to three.
    """

    group: str
    seconds: float
    share: float
    calls: int
    names: tuple[str, ...]


def by_group(kernels: Iterable[Kernel]) -> tuple[GroupTime, ...]:
    """The time of every group that has any, in the order of GROUPS."""
    kernels = sorted(kernels, key=lambda kernel: -kernel.seconds)
    total = sum(kernel.seconds for kernel in kernels)
    found = []
    for group in GROUPS:
        inside = [kernel for kernel in kernels if kernel.group == group]
        if inside:
            seconds = sum(kernel.seconds for kernel in inside)
            names = tuple(dict.fromkeys(kernel.short for kernel in inside))[:3]
            share = seconds / total if total else 0.0
            found.append(GroupTime(group, seconds, share, sum(kernel.calls for kernel in inside), names))
    return tuple(found)
