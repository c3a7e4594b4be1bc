"""Finds the bottleneck: traces, kernels in groups, memory, and what makes the host wait, before a recipe and after.

from samopt import profiling
found = profiling.compare(sam, "fast", out="profile")  # both traces are there now
found.before.audit.inside(), found.after.audit.inside()
"""

from samopt.profiling.call import CALLS, STAGES, WholeCall
from samopt.profiling.comparison import Comparison, compare
from samopt.profiling.compilations import Compilation, Compilations, GraphBreak, record_compilations
from samopt.profiling.kernels import GROUPS, GroupTime, Kernel, by_group, group_of
from samopt.profiling.memory import Memory
from samopt.profiling.profiler import Profile, StageTime, make_folder, profile
from samopt.profiling.sync_audit import Audit, audit
from samopt.profiling.syncs import Sync

__all__ = [
    "CALLS",
    "GROUPS",
    "STAGES",
    "Audit",
    "Comparison",
    "Compilation",
    "Compilations",
    "GraphBreak",
    "GroupTime",
    "Kernel",
    "Memory",
    "Profile",
    "StageTime",
    "Sync",
    "WholeCall",
    "audit",
    "by_group",
    "compare",
    "group_of",
    "make_folder",
    "profile",
    "record_compilations",
]
