"""The passes, by the names that recipes use."""

from __future__ import annotations

from samopt.base import Pass
from samopt.passes.compile import Compile
from samopt.passes.deferred_sum import DeferredSum
from samopt.passes.device_preprocess import DevicePreprocess
from samopt.passes.dtype import CastDtype
from samopt.passes.float8 import Float8Dynamic
from samopt.passes.image_pe import HoistImagePE
from samopt.passes.image_to_token import ImageToToken
from samopt.passes.int8 import Int8Dynamic
from samopt.passes.layer_norm import TritonLayerNorm
from samopt.passes.linear_gelu import LinearGELU
from samopt.passes.linear_patch_embed import LinearPatchEmbed
from samopt.passes.mask_decoder import FusedMaskDecoder
from samopt.passes.rel_pos import HoistRelPos
from samopt.passes.sdpa import SDPAttention
from samopt.passes.semi_sparse import SemiSparse
from samopt.passes.triton_attention import TritonAttention
from samopt.passes.tuned_linear import TunedLinear
from samopt.passes.upscale_masks import UpscaleMasks
from samopt.passes.where_indexing import WhereIndexing

PASSES: dict[str, type[Pass]] = {
    "linear_patch_embed": LinearPatchEmbed,
    "rel_pos": HoistRelPos,
    "image_pe": HoistImagePE,
    "where_indexing": WhereIndexing,
    "device_preprocess": DevicePreprocess,
    "sdpa": SDPAttention,
    "decoder": FusedMaskDecoder,
    "upscale_masks": UpscaleMasks,
    "dtype": CastDtype,
    "image_to_token": ImageToToken,
    "triton_attention": TritonAttention,
    "linear_gelu": LinearGELU,
    "tuned_linear": TunedLinear,
    "layer_norm": TritonLayerNorm,
    "deferred_sum": DeferredSum,
    "sparse24": SemiSparse,
    "float8": Float8Dynamic,
    "int8": Int8Dynamic,
    "compile": Compile,
}

__all__ = [
    "PASSES",
    "CastDtype",
    "Compile",
    "DeferredSum",
    "DevicePreprocess",
    "Float8Dynamic",
    "FusedMaskDecoder",
    "HoistImagePE",
    "HoistRelPos",
    "ImageToToken",
    "Int8Dynamic",
    "LinearGELU",
    "LinearPatchEmbed",
    "SDPAttention",
    "SemiSparse",
    "TritonAttention",
    "TritonLayerNorm",
    "TunedLinear",
    "UpscaleMasks",
    "WhereIndexing",
]

if __name__ != "samopt.passes":
    raise ImportError(f"this package is samopt.passes, not {__name__}: use `import samopt.passes`")
