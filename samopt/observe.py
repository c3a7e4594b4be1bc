"""Runs a model on sample pictures and prompts, and keeps what it answered and how long it took."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samopt.errors import InvalidInput
from samopt.images import as_rgb
from samopt.precision import tf32_convolutions
from samopt.preprocess import encoder_input, resized_shape
from samopt.prompts import PromptBatch
from samopt.samples import Sample

if TYPE_CHECKING:
    from segment_anything import SamPredictor
    from segment_anything.utils.transforms import ResizeLongestSide

T = TypeVar("T")

PROMPTS = 64  # answered together: always as many, as a batch of another size may round differently


@dataclass(frozen=True)
class Prediction:
    """A model's answer to one `PromptBatch`, on the CPU.

    Attributes:
        logits: low-resolution mask logits, float32 [B, C, h, w].
        iou: predicted IoU, float32 [B, C].
        masks: the masks at the picture's size, a bool [B, C, H, W] packed to bits along W.
    """

    logits: Tensor
    iou: Tensor
    masks: NDArray[np.uint8]

    @property
    def choice(self) -> NDArray[np.intp]:
        """The index of the mask with the best predicted IoU, [B]."""
        return self.iou.argmax(dim=1).numpy()

    def chosen(self, choice: NDArray[np.intp]) -> NDArray[np.uint8]:
        """The packed masks at the given indices, [B, H, W / 8]."""
        return self.masks[np.arange(len(choice)), choice]


@dataclass(frozen=True)
class Timings:
    """How long a model took on the samples, at batch 1.

    Attributes:
        encode_seconds: median time of encoding a picture, resizing included, the warm-up left out.
        first_seconds: time of the first encoding, which warms up and compiles.
        decode_seconds: median time of answering one prompt of several at once, resizing to the picture included.
        peak_bytes: peak GPU memory of the model's weights and what it computes; 0 on a CPU.
    """

    encode_seconds: float
    first_seconds: float
    decode_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Outputs:
    """All a model answered on the samples, and how long it took.

    Attributes:
        embeddings: per picture, float32 [1, C, h, w] on the CPU.
        predictions: per picture, one `Prediction` per prompt batch.
        timings: how long it took.
    """

    embeddings: list[Tensor]
    predictions: list[list[Prediction]]
    timings: Timings

    def equals(self, other: Outputs) -> bool:
        """Whether every embedding, logit and predicted IoU is bit-equal."""
        mine, theirs = self.tensors(), other.tensors()
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def finite(self) -> bool:
        """Whether no output is NaN or infinite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every embedding, then every logit, then every predicted IoU."""
        answers = [answer for picture in self.predictions for answer in picture]
        return [*self.embeddings, *(a.logits for a in answers), *(a.iou for a in answers)]


@torch.no_grad()
def observe(
    model: nn.Module, samples: Sequence[Sample], prompts: Callable[[SamPredictor, int], Sequence[PromptBatch]]
) -> Outputs:
    """Runs `model` on the samples through SamPredictor, as users do.

    Pictures are resized as the model is to have it: by PIL, as SamPredictor does, or on the device, as samopt's own
    predictors do where the pass `DevicePreprocess` was applied, so that what this costs is measured too.

    Float32 convolutions run without TF32, which PyTorch allows cuDNN by default, and outside of autocast: 11 bits or
    fewer would drown what a pass that only rounds may change.

    Args:
        model: a Sam. It is not changed.
        samples: the pictures.
        prompts: called with a predictor that has encoded the picture, and the picture's index.

    Raises:
        InvalidInput: the model has no weights to run, or a picture is too narrow for it.
    """
    from segment_anything import SamPredictor

    predictor = SamPredictor(model)
    device = predictor.device
    if device.type == "meta":
        raise InvalidInput("the model is on the meta device, without weights to measure: load them, or measure nothing")
    for sample in samples:
        check_size(predictor.transform, sample)
    before = _allocated(device)
    embeddings, predictions, encode, decode = [], [], [], []
    with _full_float32(device):
        for index, sample in enumerate(samples):
            encode.append(_encode(predictor, sample))
            embeddings.append(predictor.features.float().cpu())
            answers = []
            for batch in prompts(predictor, index):
                prediction, seconds = _answer(predictor, batch)
                answers.append(prediction)
                decode.append(seconds / len(prediction.iou))
            predictions.append(answers)
        steady = encode[1:] or [_encode(predictor, samples[0])]
    peak = torch.cuda.max_memory_allocated(device) - before + _bytes(model) if device.type == "cuda" else 0
    timings = Timings(float(np.median(steady)), encode[0], float(np.median(decode or [0.0])), peak)
    return Outputs(embeddings, predictions, timings)


def _allocated(device: torch.device) -> int:
    """GPU memory in use, from where peaks are counted anew."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), tf32_convolutions(False):
        yield


def check_size(transform: ResizeLongestSide, sample: Sample) -> None:
    """Raises InvalidInput for a picture so narrow that nothing of it is left at the model's size."""
    height, width = sample.image.shape[:2]
    try:
        resized_shape(height, width, transform.target_length)
    except InvalidInput as error:
        raise InvalidInput(f"{sample.name}: {error}") from error


def _encode(predictor: SamPredictor, sample: Sample) -> float:
    """Encodes the picture as `SamPredictor.set_image` does, but for who resizes it; returns the seconds."""
    image, model = as_rgb(sample.image), predictor.model
    predictor.reset_image()

    def encode() -> tuple[tuple[int, int], Tensor]:
        pixels, size = encoder_input(model, image)
        return size, model.image_encoder(pixels)

    (predictor.input_size, predictor.features), seconds = _timed(encode, predictor.device)
    predictor.original_size = sample.image.shape[:2]
    predictor.is_image_set = True
    return seconds


def _answer(predictor: SamPredictor, batch: PromptBatch) -> tuple[Prediction, float]:
    logits, iou, packed, seconds = [], [], [], 0.0
    for piece in batch.split(PROMPTS):
        prompt = piece.to(predictor.device)
        arguments = (prompt.points, prompt.labels, prompt.boxes, prompt.masks, prompt.multimask)
        answer, taken = _timed(functools.partial(predictor.predict_torch, *arguments), predictor.device)
        seconds += taken
        packed.append(np.packbits(answer[0].cpu().numpy(), axis=-1))
        iou.append(answer[1].float().cpu())
        logits.append(answer[2].float().cpu())
    return Prediction(torch.cat(logits), torch.cat(iou), np.concatenate(packed)), seconds


def _timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
