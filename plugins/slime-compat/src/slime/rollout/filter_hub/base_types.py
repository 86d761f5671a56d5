"""What filters return."""

from slime_compat.views.samples.outputs import DynamicFilterOutput, MetricGatherer, call_dynamic_filter

__all__ = ["DynamicFilterOutput", "MetricGatherer", "call_dynamic_filter"]
