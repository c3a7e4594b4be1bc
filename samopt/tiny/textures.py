"""Colours of pixels: patterns between an object's two colours, and its shading.

Only operations that IEEE rounds exactly, and integer hashes; see ``raster``. Shapes: tables of ``B`` scenes are
[B, columns], pixel coordinates x [1, 1, W] and y [1, H, 1].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layout import CENTER, CHECKER, COLOR, FLAT, GRADIENT, NOISE, PHASE, SECOND_COLOR, SHADE, STRIPES, WAVE


def columns(table: Tensor, where: slice) -> list[Tensor]:
    return [column[:, None, None] for column in table[:, where].unbind(1)]


def column(table: Tensor, where: int) -> Tensor:
    return table[:, where, None, None]


def hash_pixels(ix: Tensor, iy: Tensor, salt: Tensor) -> Tensor:
    """Well mixed int32 of two int32 coordinates and a salt; products wrap."""
    mixed = ix * 374761393 + iy * 668265263 + salt * 40503
    mixed = (mixed ^ (mixed >> 13)) * 1274126177
    mixed = (mixed ^ (mixed >> 15)) * 461845907
    return mixed ^ (mixed >> 16)


def _value_noise(tx: Tensor, ty: Tensor, salt: Tensor) -> Tensor:
    """Smooth noise in [0, 1] with one knot per unit."""
    left, top = tx.floor(), ty.floor()
    fx, fy = tx - left, ty - top
    fx, fy = fx * fx * (3 - 2 * fx), fy * fy * (3 - 2 * fy)
    ix, iy = left.int(), top.int()
    corner = [(hash_pixels(ix + i, iy + j, salt) & 0xFFFF).to(tx.dtype) * (1 / 65536) for j in (0, 1) for i in (0, 1)]
    upper = corner[0] + (corner[1] - corner[0]) * fx
    lower = corner[2] + (corner[3] - corner[2]) * fx
    return upper + (lower - upper) * fy


def _wave(t: Tensor) -> Tensor:
    """A square wave of period 1 with slightly soft flanks, in [0, 1]."""
    return ((0.25 - (t - t.floor() - 0.5).abs()) * 12 + 0.5).clamp(0, 1)


def _noise(tx: Tensor, ty: Tensor, salt: Tensor) -> Tensor:
    rough = 0.62 * _value_noise(tx, ty, salt) + 0.38 * _value_noise(tx * 2.7, ty * 2.7, salt + 1)
    return ((rough - 0.5) * 2.2 + 0.5).clamp(0, 1)


def _checker(tx: Tensor, ty: Tensor, salt: Tensor) -> Tensor:
    across, along = _wave(tx), _wave(ty)
    return across + along - 2 * across * along


_PATTERNS: dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    FLAT: lambda tx, ty, salt: torch.zeros_like(tx),
    STRIPES: lambda tx, ty, salt: _wave(tx),
    CHECKER: _checker,
    GRADIENT: lambda tx, ty, salt: tx.clamp(0, 1),
    NOISE: _noise,
}


def _texture_frame(paint: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wave_x, wave_y = columns(paint, WAVE)
    phase_x, phase_y = columns(paint, PHASE)
    return x * wave_x + y * wave_y + phase_x, y * wave_x - x * wave_y + phase_y


def mix(paint: Tensor, pattern: Tensor) -> Tensor:
    """Colours [B, 3, H, W] of a pattern [B, H, W] between the first and the second colour."""
    first, second = paint[:, COLOR, None, None], paint[:, SECOND_COLOR, None, None]
    return first + (second - first) * pattern[:, None]


def shade(paint: Tensor, shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    cx, cy = columns(shape, CENTER)
    shade_x, shade_y = columns(paint, SHADE)
    return (1 + (x - cx) * shade_x + (y - cy) * shade_y).clamp(0.55, 1.45)


def any_pattern(paint: Tensor, texture: Tensor, salt: Tensor, x: Tensor, y: Tensor) -> Tensor:
    tx, ty = _texture_frame(paint, x, y)
    salt, texture = salt[:, None, None], texture[:, None, None]
    pattern = torch.where(texture == NOISE, _noise(tx, ty, salt), torch.zeros_like(tx))
    pattern = torch.where(texture == STRIPES, _wave(tx), pattern)
    pattern = torch.where(texture == CHECKER, _checker(tx, ty, salt), pattern)
    return torch.where(texture == GRADIENT, tx.clamp(0, 1), pattern)


def one_pattern(paint: Tensor, texture: int, salt: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return _PATTERNS[texture](*_texture_frame(paint, x, y), salt[:, None, None])
