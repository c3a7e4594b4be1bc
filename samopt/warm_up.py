"""Runs what a model does only once before it matters: a service is warm when it takes its first job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from samopt.batch_predictor import BatchPredictor
from samopt.errors import InvalidInput
from samopt.structure import check_sam

TWICE = 2  # what comes again may be captured as a CUDA graph


def warm_up(model: nn.Module, batch_sizes: Sequence[int] = (1,)) -> None:
    """Encodes blank images and answers a point and a box, so that compilation, the search for the kernels' fastest
    configurations, CUDA graphs and what libraries set up at a first call are not left to the first pictures.

    What a later call needs beyond that, it still makes: another number of prompts, say, or of points.

    Args:
        model: a Sam, unmodified, optimised, loaded or exported. Hooks on it are called.
        batch_sizes: images per call of the encoder, as they will come.

    Raises:
        InvalidInput: no Sam, or a batch size below 1.
    """
    from segment_anything import SamPredictor

    check_sam(model)
    if any(size < 1 for size in batch_sizes):
        raise InvalidInput(f"batch sizes must be at least 1, not {', '.join(map(str, batch_sizes))}")
    sam: Any = model
    side = sam.image_encoder.img_size
    blank = np.zeros((side, side, 3), np.uint8)
    for size in batch_sizes:
        BatchPredictor(model, batch_size=size).set_images([blank] * size)
    predictor = SamPredictor(model)
    predictor.set_image(blank)
    for _ in range(TWICE):
        predictor.predict(np.ones((1, 2)), np.ones(1))
        predictor.predict(box=np.array([0, 0, 8, 8]), multimask_output=False)
