"""samopt optimises Meta's unmodified Segment Anything, pass by pass, with the accuracy shown before and after each.

from samopt import optimize
fast = optimize(sam, recipe="fast")
print(samopt.report(fast))
"""

from samopt.automatic_mask_generator import AutomaticMaskGenerator
from samopt.base import Numerics, Pass, Phase
from samopt.batch_predictor import BatchAnswer, BatchPredictor, Embedding, Prompts
from samopt.errors import (
    AccuracyError,
    AlreadyApplied,
    CheckpointError,
    InvalidInput,
    NoSites,
    RecipeError,
    SamoptError,
    SavedModelError,
    Unsupported,
)
from samopt.export import export
from samopt.exported import load_exported
from samopt.folders import embed, load_embedding, segment
from samopt.gate import Budget
from samopt.graphs import Declined, GraphPass
from samopt.load import load
from samopt.optimize import optimize
from samopt.rebind import clone, rebind
from samopt.recipe import Recipe, Step
from samopt.report import Report, report
from samopt.result import PassResult, Site, Skip
from samopt.samples import Sample
from samopt.save import save
from samopt.verify import Agreement, Reference, verify
from samopt.warm_up import warm_up

__all__ = [
    "AccuracyError",
    "Agreement",
    "AlreadyApplied",
    "AutomaticMaskGenerator",
    "BatchAnswer",
    "BatchPredictor",
    "Budget",
    "CheckpointError",
    "Declined",
    "Embedding",
    "GraphPass",
    "InvalidInput",
    "NoSites",
    "Numerics",
    "Pass",
    "PassResult",
    "Phase",
    "Prompts",
    "Recipe",
    "RecipeError",
    "Reference",
    "Report",
    "SamoptError",
    "Sample",
    "SavedModelError",
    "Site",
    "Skip",
    "Step",
    "Unsupported",
    "clone",
    "embed",
    "export",
    "load",
    "load_embedding",
    "load_exported",
    "optimize",
    "rebind",
    "report",
    "save",
    "segment",
    "verify",
    "warm_up",
]
