"""Graph passes: methods traced with torch.fx, rewritten, and bound to a clone of their module."""

from samopt.graphs.graph_pass import GraphPass, own_methods
from samopt.graphs.source_check import Declined

__all__ = ["Declined", "GraphPass", "own_methods"]
