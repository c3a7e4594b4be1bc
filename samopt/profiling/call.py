"""One whole call of a Sam as its users make it, `set_image` and `predict`, with a name for each of its stages.

The stages are named from outside: SamPredictor gets a stand-in for the model, whose parts say when they are called. The
model itself gets no hook, as hooks keep compiled encoders from CUDA graphs, and is not changed in any other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samopt.images import as_rgb
from samopt.preprocess import ATTRIBUTE, DEVICE, encoder_input
from samopt.prompts import choose_objects, innermost
from samopt.samples import Sample
from samopt.structure import encoders

CALLS = ("set_image", "predict")
STAGES = ("preprocess", "image encoder", "prompt encoder", "mask decoder", "postprocess")

Enter = Callable[[str], AbstractContextManager[Any]]  # what to be inside of while a stage, or a call, runs

_PARTS = {  # of a Sam: which of its methods belong to which stage; "" is the call itself
    "image_encoder": {"": "image encoder"},
    "prompt_encoder": {"": "prompt encoder", "get_dense_pe": "prompt encoder"},
    "mask_decoder": {"": "mask decoder"},
    "preprocess": {"": "preprocess"},
    "postprocess_masks": {"": "postprocess"},
}


@dataclass(frozen=True, eq=False)  # arrays have no single truth to be equal by
class WholeCall:
    """A picture and a point on it: what `set_image` and `predict` are called with.

    Attributes:
        image: RGB, uint8 [H, W, 3].
        point: (x, y) in pixels, float [1, 2].
    """

    image: NDArray[np.uint8]
    point: NDArray[np.float64]

    @classmethod
    def of(cls, sample: Sample) -> WholeCall:
        """The call for a sample: a point on one of its objects, or the picture's middle where none is known."""
        height, width = sample.image.shape[:2]
        point = np.array([width / 2, height / 2])
        if sample.masks is not None and (chosen := choose_objects(sample.masks, 1)).size:
            (index,) = chosen
            point = innermost(sample.masks[index]) if sample.points is None else sample.points[index]
        return cls(sample.image, np.asarray(point, dtype=np.float64)[None])

    def __call__(self, model: nn.Module, enter: Enter = nullcontext) -> tuple[NDArray[Any], ...]:
        """Makes the call, and is done when the masks are on the host.

        Pictures are resized by SamPredictor; on the device, as samopt's own predictors do, where the pass
        `DevicePreprocess` was applied.

        Args:
            model: a Sam.
            enter: called with the name of each of CALLS and STAGES, as it begins.

        Returns:
            Masks bool [3, H, W], predicted IoU [3], and logits [3, h, w].
        """
        from segment_anything import SamPredictor

        predictor: Any = SamPredictor(_Staged(model, enter, {}, _PARTS))
        predictor.transform = _Staged(predictor.transform, enter, {"apply_image": "preprocess"}, {})
        with enter("set_image"):
            if vars(model).get(ATTRIBUTE) == DEVICE:
                self._set_image(predictor, model, enter)
            else:
                predictor.set_image(self.image)
        with enter("predict"):
            return predictor.predict(self.point, np.ones(1, dtype=np.int32))

    @torch.no_grad()
    def _set_image(self, predictor: Any, model: nn.Module, enter: Enter) -> None:
        image = as_rgb(self.image).to(predictor.device)
        with enter("preprocess"):
            pixels, predictor.input_size = encoder_input(model, image)
        predictor.features = predictor.model.image_encoder(pixels)
        predictor.original_size = self.image.shape[:2]
        predictor.is_image_set = True


class _Staged:
    """Something as it is, but that some of its methods, and some of its parts' methods, are inside a stage."""

    def __init__(self, whole: Any, enter: Enter, methods: dict[str, str], parts: dict[str, dict[str, str]]) -> None:
        self._whole, self._enter, self._methods, self._parts = whole, enter, methods, parts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._whole, name)
        if name in self._parts:
            return _Staged(found, self._enter, self._parts[name], {})
        return _Staged(found, self._enter, {"": self._methods[name]}, {}) if name in self._methods else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._enter(self._methods[""]):
            return self._whole(*args, **kwargs)


@contextmanager
def named_blocks(model: nn.Module) -> Iterator[None]:
    """Names every block of the image encoder in a trace, "block 0" and so on, by hooks that go when the context ends.

    A model that is compiled gets none: they would keep it from its CUDA graphs, or be compiled.
    """
    with ExitStack() as hooks:
        if all(module._compiled_call_impl is None for module in model.modules()):
            for _, encoder in encoders(model):
                for index, block in enumerate(encoder.blocks.children()):
                    for handle in _name(block, f"block {index}"):
                        hooks.callback(handle.remove)
        yield


def _name(module: nn.Module, name: str) -> tuple[Any, Any]:
    ranges: list[torch.profiler.record_function] = []

    def before(*_: Any) -> None:
        ranges.append(torch.profiler.record_function(name))
        ranges[-1].__enter__()

    def after(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    first = module.register_forward_pre_hook(before, prepend=True)
    return first, module.register_forward_hook(after, always_call=True)
