"""Spans of a user's own; the run's events have requests and rewards themselves."""

from slime_compat.views.timing import trace_event, trace_function, trace_span

__all__ = ["trace_event", "trace_function", "trace_span"]
