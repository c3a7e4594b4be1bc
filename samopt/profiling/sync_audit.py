"""The sync audit: where a whole call of a model makes the host wait for the GPU, by file and line.

It runs on fake tensors, on any machine, and says the same on all of them. Compiled modules are audited by the code that
they are compiled from: TorchInductor adds nothing that waits, and with `fullgraph=True` no Python is left to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from samopt.errors import SamoptError, Unsupported, first_line
from samopt.profiling.call import CALLS, WholeCall
from samopt.profiling.syncs import Sync, on_fake_cuda, record_syncs
from samopt.shown import Shown

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Audit(Shown):
    """What a whole call waits for.

    Attributes:
        syncs: each place that waits, with how often a call does there, in the order in which they are met.
        stopped: why the audit ended before the call did, as where code branches on a value; "" where it did not.
    """

    syncs: tuple[tuple[Sync, int], ...]
    stopped: str = ""

    def inside(self) -> tuple[tuple[Sync, int], ...]:
        """Those in the model's own stages: not the copies of picture, prompt and masks that each call makes."""
        return tuple((sync, count) for sync, count in self.syncs if sync.stage not in CALLS)

    def to_dict(self) -> dict[str, Any]:
        """{"syncs": [{reason, file, line, function, code, stage, place, count}], "stopped"}, for JSON."""
        syncs = [{**asdict(sync), "place": sync.place, "count": count} for sync, count in self.syncs]
        return {"syncs": syncs, "stopped": self.stopped}

    def __rich__(self) -> Table:
        from samopt.profiling.tables import of_audit

        return of_audit(self)


def audit(model: nn.Module, call: WholeCall) -> Audit:
    """Finds each place at which `set_image` and `predict` make the host wait for the GPU.

    Args:
        model: a Sam, on any device; it is not changed.
        call: what to call it with.

    Raises:
        Unsupported: a build of PyTorch without CUDA, which has no fake tensors on a GPU (a GPU is not needed); or
            weights that are tensors of torchao's own kinds.
        InvalidInput: a picture that the model cannot take.
    """
    if torch.version.cuda is None:
        remedy = "install one with CUDA: no GPU is needed"
        raise Unsupported("the sync audit needs fake CUDA tensors, which this build of PyTorch does not have", remedy)
    for tensor in model.parameters():
        if is_traceable_wrapper_subclass(tensor):
            reason = f"the sync audit can make no fake tensor of a weight that is a {type(tensor).__name__}"
            raise Unsupported(reason, "audit the model without the pass that made it")
    stages: list[str] = []

    @contextmanager
    def enter(stage: str) -> Iterator[None]:
        stages.append(stage)
        yield
        stages.pop()  # not after an error: the last one is where it happened

    stopped = ""
    with torch.no_grad(), record_syncs(lambda: stages[-1] if stages else "") as syncs:
        fake = on_fake_cuda(model)
        try:
            call(fake, enter)
        except SamoptError:
            raise
        except Exception as error:  # code may need values, as `if mask.any():` does
            stopped = f"the {stages[-1] if stages else 'call'} failed on tensors without values: {first_line(error)}"
    return Audit(tuple(Counter(syncs).items()), stopped)
