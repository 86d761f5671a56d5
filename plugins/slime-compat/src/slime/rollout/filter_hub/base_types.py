"""What filters return."""

from slime_compat.views.outputs import DynamicFilterOutput, call_dynamic_filter

__all__ = ["DynamicFilterOutput", "call_dynamic_filter"]
