"""Charts of benchmarks and profiles, as matplotlib figures that can be written as SVG and PNG."""

from samopt.charts.accuracy import accuracy_against_speed
from samopt.charts.kernel_time import kernel_time
from samopt.charts.style import save, to_svg
from samopt.charts.waterfall import memory_waterfall, throughput_waterfall

__all__ = ["accuracy_against_speed", "kernel_time", "memory_waterfall", "save", "throughput_waterfall", "to_svg"]
