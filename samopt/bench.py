"""Speed of the image encoder: one model, one process, one table.

The unmodified model, recipes, and other implementations at several batch sizes, all on the same weights and pixels.
Only passes that stood verification on the embedded model, whose weights are trained, are timed; the models timed
here have random weights, as speed does not depend on them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from samopt.base import Pass, Phase
from samopt.bench_table import Row, Setting
from samopt.errors import InvalidInput, SamoptError, first_line
from samopt.optimize import optimize
from samopt.passes import CastDtype, TritonLayerNorm
from samopt.peers import Build, Peer, version
from samopt.recipe import Recipe, Step
from samopt.report import report
from samopt.timing import Encoder, encoder_tflop, matmul_tflops, tf32, timed
from samopt.verify import relative_error

if TYPE_CHECKING:
    from segment_anything.modeling import Sam

TF32_BATCH, PEER_BATCH = 8, 16  # the largest of the batch sizes that these rows take unasked


@dataclass(frozen=True)
class Entry:
    """A row to be: what to time, and how.

    Attributes:
        what: what the row is called.
        batch_size: images per call.
        build: makes the encoder.
        tf32: whether float32 arithmetic may use TF32.
        most_error: most relative error of the embedding; None sets no limit.
    """

    what: str
    batch_size: int
    build: Build
    tf32: bool = False
    most_error: float | None = None


def verified(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe's steps that stand verification on the embedded model, on this device.

    That model is narrow: a pass that leaves narrow norms alone is verified on them all the same, and one that is to be
    kept only if it is faster is not judged by it. Of passes that quantise, each is verified without the others: where
    the first turns out no faster, the next takes its place.
    """
    from samopt.tiny import load_tiny

    quantizing = [step for step in recipe.steps if step.pass_.phase is Phase.QUANTIZE]
    stood: list[Step] = []
    alternatives: list[Step | None] = [*quantizing] or [None]
    for one in alternatives:
        steps = [step for step in recipe.steps if step not in quantizing or step is one]
        everywhere = [replace(step, pass_=_anywhere(step.pass_), keep="always") for step in steps]
        rows = report(optimize(load_tiny().to(device), replace(recipe, steps=tuple(everywhere)))).steps
        stood += [step for step, row in zip(steps, rows, strict=True) if row.status == "applied"]
    kept = [step for step in recipe.steps if step in stood]
    return Recipe(kept, recipe.accuracy, recipe.name, recipe.description)


def _anywhere(pass_: Pass) -> Pass:
    return replace(pass_, wider_than=0) if isinstance(pass_, TritonLayerNorm) else pass_


def plan(
    recipes: Sequence[Recipe],
    batch_sizes: Sequence[int],
    device: torch.device,
    peers: Sequence[Peer] = (),
    peer_batch_sizes: Sequence[int] = (),
) -> list[Entry]:
    """The rows of a comparison, the base of its ratios first.

    Args:
        recipes: each at every batch size, applied without measuring accuracy; see `verified`.
        batch_sizes: for the recipes. The unmodified model runs at batch 1; where there is TF32 also with it, at batch 1
            and the largest size up to 8; and in eager half precision at batch 1 and the first size above it.
        device: where the rows will run.
        peers: each at every size of `peer_batch_sizes`.
        peer_batch_sizes: without any, the largest of `batch_sizes` up to 16: some peers compile for minutes per size.
    """
    sizes = list(dict.fromkeys(batch_sizes))
    entries = [Entry("unmodified", 1, _unmodified)]
    if device.type == "cuda":
        largest = max((size for size in sizes if size <= TF32_BATCH), default=1)
        entries += [Entry("unmodified, TF32", size, _unmodified, tf32=True) for size in dict.fromkeys([1, largest])]
    above = next(([size] for size in sizes if size > 1), [])
    for half in dict.fromkeys(CastDtype((recipe.find(CastDtype) or CastDtype()).dtype) for recipe in recipes):
        entries += [Entry(f"eager {half.dtype}", size, _eager(half)) for size in [1, *above]]
    entries += [
        Entry(recipe.name, size, _optimised(recipe, size), most_error=recipe.accuracy.embedding_error)
        for recipe in recipes
        for size in sizes
    ]
    unasked = max((size for size in sizes if size <= PEER_BATCH), default=min(sizes))
    for peer in peers:
        entries += [Entry(peer.label, size, peer.build) for size in dict.fromkeys(peer_batch_sizes or [unasked])]
    return entries


@contextlib.contextmanager
def _unmodified(sam: Sam, device: torch.device) -> Iterator[Encoder]:
    yield copy.deepcopy(sam.image_encoder).to(device)


def _eager(half: CastDtype) -> Build:
    @contextlib.contextmanager
    def build(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        model = copy.deepcopy(sam).to(device)
        half(model)
        yield model.image_encoder

    return build


@dataclass(frozen=True)
class Remarked:
    """An encoder, and what its row has to say of it."""

    encoder: Encoder
    remark: str

    def __call__(self, pixels: Tensor) -> Tensor:
        return self.encoder(pixels)


def _may_be_left_out(pass_: Pass, quantized: bool) -> bool:
    """Whether a pass may find nothing to do: norms may be narrow, and then are fast; layers are quantised once."""
    return isinstance(pass_, TritonLayerNorm) or (quantized and pass_.phase is Phase.QUANTIZE)


def _optimised(recipe: Recipe, batch_size: int) -> Build:
    @contextlib.contextmanager
    def build(sam: Sam, device: torch.device) -> Iterator[Encoder]:
        model = optimize(copy.deepcopy(sam).to(device), recipe, inplace=True, verify="off", batch_size=batch_size)
        undone = []
        quantized = False
        for step, given in zip(report(model).steps, recipe.steps, strict=True):
            # It stood verification: without it the row is not what it says.
            if step.status == "undone":  # which is what the recipe asks for, of this model on this device
                undone.append(f"without {step.name}, {step.reason}")
            elif step.status != "applied" and not _may_be_left_out(given.pass_, quantized):
                raise SamoptError(f"{step.name} {step.status}: {step.reason}")
            if step.status == "applied" and step.skipped:
                raise SamoptError(f"{step.name} left out {step.skipped[0]}")
            quantized |= step.status == "applied" and step.phase is Phase.QUANTIZE
        _free()  # what was compiled to judge passes is no saving of the row's first call
        yield Remarked(model.image_encoder, "; ".join(undone))

    return build


class EncoderBench:
    """Times encoders of one model, all on the same weights and pixels.

    Args:
        model_type: a name in Meta's registry, or "sam_tiny".
        device: where to run.
        seed: of weights and pixels.
        peers: those that will be timed, for their versions.

    Raises:
        InvalidInput: an unknown model type; or torch.compile is switched off for this process.
    """

    def __init__(self, model_type: str, device: torch.device, seed: int = 0, peers: Sequence[Peer] = ()) -> None:
        if torch._dynamo.config.disable:
            raise InvalidInput("TORCH_COMPILE_DISABLE is set: compiled rows would run uncompiled; unset it")
        self._sam = random_model(model_type, seed)
        self._device, self._seed = device, seed
        self.setting = Setting(
            model=model_type,
            seed=seed,
            device=str(device),
            image_tflop=encoder_tflop(self._sam.image_encoder),
            matmul_tflops=matmul_tflops(device),
            versions=_versions(device, peers),
        )

    def rows(self, entries: Sequence[Entry]) -> Iterator[Row]:
        """Times one entry after the other. One that fails is a row with a note, as the others may still run.

        The first entry is the base of the ratios: what it raises is raised.
        """
        generator = torch.Generator().manual_seed(self._seed)
        size = self._sam.image_encoder.img_size
        pixels = torch.randn(max(entry.batch_size for entry in entries), 3, size, size, generator=generator)
        truth = self._answers(pixels)
        base = self._row(entries[0], pixels, truth, None)
        yield base
        for entry in entries[1:]:
            try:
                row = self._row(entry, pixels, truth, base.milliseconds)
            except Exception as error:  # a peer may raise anything
                row = Row(entry.what, entry.batch_size, note=first_line(error))
            yield row

    @torch.no_grad()
    def _answers(self, pixels: Tensor) -> Tensor:
        """The unmodified model's embeddings, on the CPU; one image at a time, as its attention takes much memory."""
        with tf32(False), _unmodified(self._sam, self._device) as encoder:
            return torch.cat([encoder(image[None].to(self._device)).cpu() for image in pixels])

    def _row(self, entry: Entry, pixels: Tensor, truth: Tensor, base: float | None) -> Row:
        _free()
        count = entry.batch_size
        with tf32(entry.tf32), entry.build(self._sam, self._device) as encoder:
            found = timed(encoder, pixels[:count].to(self._device))
        if not found.output.isfinite().all():
            raise SamoptError("its embedding holds NaN or infinity")
        error = relative_error([found.output], [truth[:count]])
        if entry.most_error is not None and error > entry.most_error:
            raise SamoptError(f"its embedding errs by {error:.1e}, more than the recipe's {entry.most_error:g}")
        speed = count / found.seconds
        milliseconds = 1e3 / speed
        return Row(
            what=entry.what,
            batch_size=count,
            milliseconds=milliseconds,
            spread=found.spread,
            images_per_second=speed,
            ratio=(base or milliseconds) / milliseconds,
            share=speed * self.setting.image_tflop / self.setting.matmul_tflops,
            peak_gib=found.peak_gib,
            error=error,
            first_seconds=found.first_seconds,
            remark=encoder.remark if isinstance(encoder, Remarked) else "",
        )


def _free() -> None:
    """Gives back what the row before held, compilations included: peak memory and first call are a row's own."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _versions(device: torch.device, peers: Sequence[Peer]) -> dict[str, str]:
    found = {"samopt": version("samopt"), "system": platform.platform()}
    found |= {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(device)}
    else:
        found["threads"] = str(torch.get_num_threads())
    return found | {peer.name: version(peer.name) for peer in peers}


def random_model(model_type: str, seed: int) -> Sam:
    """A Sam with random weights; positions too, which are zero when Meta's classes are built.

    Raises:
        InvalidInput: an unknown model type.
    """
    from segment_anything import sam_model_registry

    from samopt.tiny import load_tiny

    if model_type == "sam_tiny":
        return load_tiny()
    if model_type not in sam_model_registry:
        known = ", ".join(name for name in sam_model_registry if name != "default")
        raise InvalidInput(f"unknown model type {model_type!r}; known: {known}, sam_tiny")
    torch.manual_seed(seed)
    sam: Sam = sam_model_registry[model_type]()
    with torch.no_grad():
        for name, parameter in sam.image_encoder.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:
                nn.init.normal_(parameter, std=0.1)
    return sam
