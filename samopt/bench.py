"""Speed and accuracy of one model in one process, row by row, on the same weights and pixels."""

from __future__ import annotations

import copy
import functools
import itertools
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samopt.batch_predictor import BatchPredictor, Prompts
from samopt.bench_build import Candidate, NothingAdded, free, unmodified
from samopt.bench_model import BenchModel
from samopt.bench_table import FAILED, LEFT_OUT, Row, Setting
from samopt.errors import InvalidInput, SamoptError, first_line
from samopt.images import as_rgb
from samopt.peers import Build, Peer, version
from samopt.preprocess import encoder_input
from samopt.samples import Sample
from samopt.timing import encoder_tflop, matmul_tflops, repeated, tf32, timed
from samopt.verify import KindAgreement, Reference, compare, relative_error, verify

PHOTO = 1200, 1800  # rows and columns of the noise that stands for a photo where there is no picture


@dataclass(frozen=True)
class Entry:
    """A row to be: what to time, and how.

    Attributes:
        what: what the row is called.
        batch_size: images per call.
        build: makes the encoder, a `Candidate` where it is one of a whole model; None leaves the row out.
        tf32: whether float32 arithmetic may use TF32.
        most_error: most relative error of the embedding; None sets no limit.
        adds: names of the passes that the row adds.
        cumulative: whether it adds them to the row before of its batch size.
        remark: what the row has to say, whatever it measures; why it is left out.
    """

    what: str
    batch_size: int
    build: Build | None
    tf32: bool = False
    most_error: float | None = None
    adds: tuple[str, ...] = ()
    cumulative: bool = False
    remark: str = ""


class Bench:
    """Times encoders of one model, and whole calls and masks where they are wanted.

    Masks are measured where the weights are trained, under the prompts of `samopt.coco`: one point for every object,
    of three masks the one rated best. They do not depend on the batch size, and are measured once for the same passes.

    Args:
        model: what is timed.
        device: where to run.
        seed: of pixels and of pictures made of noise.
        peers: those that will be timed, for their versions.
        samples: the pictures to encode; None encodes normal noise.
        whole: also measure whole calls, from picture to masks, and masks: of `samples`, or of noise in a photo's size.

    Raises:
        InvalidInput: torch.compile is switched off for this process.
    """

    def __init__(
        self,
        model: BenchModel,
        device: torch.device,
        seed: int = 0,
        peers: Sequence[Peer] = (),
        *,
        samples: Sequence[Sample] | None = None,
        whole: bool = False,
    ) -> None:
        if torch._dynamo.config.disable:
            raise InvalidInput("TORCH_COMPILE_DISABLE is set: compiled rows would run uncompiled; unset it")
        self._sam, self._device, self._seed, self._whole = model.sam, device, seed, whole
        self._samples = samples
        self._measures_masks = whole and model.trained and samples is not None
        self._reference: Reference | None = None
        self._masks: dict[Any, KindAgreement | None] = {}
        self.setting = Setting(
            model=model.name,
            seed=seed,
            device=str(device),
            image_tflop=encoder_tflop(self._sam.image_encoder),
            matmul_tflops=matmul_tflops(device),
            versions=versions_of(device, peers),
            weights=model.weights,
            pictures=_described(samples),
            masks=_why_no_masks(model) if whole and not self._measures_masks else "",
        )

    def rows(self, entries: Sequence[Entry]) -> Iterator[Row]:
        """Times one entry after the other. One that fails is a row with a note, as the others may still run.

        The first entry is the base of the ratios: what it raises is raised.
        """
        pixels = self._pixels(max(entry.batch_size for entry in entries))
        truth = self._answers(pixels)
        self._record()
        base = self._row(entries[0], pixels, truth, None, None)
        yield base
        before: dict[int, Row] = {}
        for entry in entries[1:]:
            row = replace(_untimed(entry), status=LEFT_OUT)
            if entry.build is not None:
                try:
                    row = self._row(entry, pixels, truth, base, before.get(entry.batch_size, base))
                    before[entry.batch_size] = row
                except NothingAdded as reason:
                    row = replace(row, remark="; ".join(filter(None, (entry.remark, str(reason)))))
                except Exception as error:  # a peer may raise anything
                    row = replace(row, status=FAILED, note=first_line(error))
            yield row

    def _pixels(self, count: int) -> Tensor:
        """What encoders take, [count, 3, S, S] on the CPU; pictures come again where there are too few of them."""
        if self._samples is None:
            size = self._sam.image_encoder.img_size
            return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(self._seed))
        chosen = self._samples[:count]
        made = [encoder_input(self._sam, as_rgb(sample.image, sample.name))[0] for sample in chosen]
        return torch.cat([*itertools.islice(itertools.cycle(made), count)])

    def _pictures(self, count: int) -> list[Any]:
        random = np.random.default_rng(self._seed)
        noise = random.integers(0, 256, (*PHOTO, 3), dtype=np.uint8)
        found = [noise] if self._samples is None else [sample.image for sample in self._samples[:count]]
        return [*itertools.islice(itertools.cycle(found), count)]

    @torch.no_grad()
    def _answers(self, pixels: Tensor) -> Tensor:
        """The unmodified model's embeddings, on the CPU; one image at a time, as its attention takes much memory."""
        with tf32(False), unmodified(self._sam, self._device) as encoder:
            return torch.cat([encoder(image[None].to(self._device)).cpu() for image in pixels])

    def _record(self) -> None:
        """What the unmodified model answers on the samples."""
        if not self._measures_masks:
            return
        model = copy.deepcopy(self._sam).to(self._device)
        with tf32(False):
            reference = Reference.record(model, self._samples, kinds=("point",), objects=None)
        self._reference = reference
        masks = compare(reference.outputs, reference).masks
        self._masks[(), False] = masks
        counted = "not measured, the unmodified model cannot place them"
        if masks is not None:
            counted = (
                f"{len(masks.ious)} on {len(reference.samples)} pictures, from a point each, the best rated of three"
            )
        self.setting = replace(self.setting, masks=counted)

    def _row(self, entry: Entry, pixels: Tensor, truth: Tensor, base: Row | None, before: Row | None) -> Row:
        free()
        count = entry.batch_size
        whole = masks = None
        assert entry.build is not None
        with tf32(entry.tf32), entry.build(self._sam, self._device) as encoder:
            found = timed(encoder, pixels[:count].to(self._device))
            if not found.output.isfinite().all():
                raise SamoptError("its embedding holds NaN or infinity")
            error = relative_error([found.output], [truth[:count]])
            if entry.most_error is not None and error > entry.most_error:
                raise SamoptError(f"its embedding errs by {error:.1e}, more than the recipe's {entry.most_error:g}")
            if isinstance(encoder, Candidate) and self._whole:
                call = whole_call(encoder.sam, self._pictures(count))
                whole = 1e3 * repeated(call, self._device)[0] / count
                masks = self._agreement(encoder, entry.tf32)
        speed = count / found.seconds
        milliseconds = 1e3 / speed
        remarks = entry.remark, encoder.remark if isinstance(encoder, Candidate) else ""
        return replace(
            _untimed(entry),
            milliseconds=milliseconds,
            spread=found.spread,
            images_per_second=speed,
            ratio=_milliseconds(base, milliseconds) / milliseconds,
            ratio_before=_milliseconds(before, milliseconds) / milliseconds if entry.cumulative else None,
            share=speed * self.setting.image_tflop / self.setting.matmul_tflops,
            peak_gib=found.peak_gib,
            error=error,
            first_seconds=found.first_seconds,
            remark="; ".join(filter(None, remarks)),
            whole_milliseconds=whole,
            mask_iou=None if masks is None else masks.mean_iou,
            min_iou=None if masks is None else masks.min_iou,
            miou=None if masks is None else masks.truth,
        )

    def _agreement(self, candidate: Candidate, tf32: bool) -> KindAgreement | None:
        if self._reference is None:
            return None
        key = candidate.passes, tf32
        if key not in self._masks:
            self._masks[key] = verify(candidate.sam, self._reference).masks
        return self._masks[key]


def _untimed(entry: Entry) -> Row:
    return Row(entry.what, entry.batch_size, adds=entry.adds, remark=entry.remark)


def _milliseconds(row: Row | None, otherwise: float) -> float:
    return otherwise if row is None or row.milliseconds is None else row.milliseconds


def whole_call(sam: Any, pictures: Sequence[Any]) -> functools.partial[Any]:
    """A call that does for pictures what `set_image` and `predict` of SamPredictor do: resizes and encodes them, as one
    batch, answers a point in the middle of each, and brings the masks to the host."""
    prompts = [Prompts([[[p.shape[1] / 2, p.shape[0] / 2]]], [[1]]) for p in pictures]
    return functools.partial(_answer, BatchPredictor(sam, batch_size=len(pictures)), pictures, prompts)


def _answer(predictor: BatchPredictor, pictures: Sequence[Any], prompts: Sequence[Prompts]) -> list[Tensor]:
    predictor.set_images(pictures)
    return [answer.masks.cpu() for answer in predictor.predict(prompts)]


def _described(samples: Sequence[Sample] | None) -> str:
    if samples is None:
        return f"noise; whole calls take a picture of {PHOTO[1]} x {PHOTO[0]} pixels"
    shown = ", ".join(sample.name for sample in samples[:3])
    return f"{len(samples)}: {shown}" + (", ..." if len(samples) > 3 else "")


def _why_no_masks(model: BenchModel) -> str:
    if not model.trained:
        return "not measured, random weights; --checkpoint, or sam_tiny, has trained ones"
    return "not measured, no pictures"


def versions_of(device: torch.device, peers: Sequence[Peer]) -> dict[str, str]:
    found = {"samopt": version("samopt"), "system": platform.platform()}
    found |= {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(device)}
    else:
        found["threads"] = str(torch.get_num_threads())
    return found | {peer.name: version(peer.name) for peer in peers}
