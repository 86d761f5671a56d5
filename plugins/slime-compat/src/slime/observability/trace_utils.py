"""Spans of a user's own; the run's events have requests and rewards themselves."""

from slime_compat.views.running.timing import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    trace_event,
    trace_function,
    trace_span,
)

__all__ = ["bind_trace", "build_sglang_meta_trace_attrs", "trace_event", "trace_function", "trace_span"]
