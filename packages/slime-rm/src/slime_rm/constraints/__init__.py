"""Checks of the constraints that a prompt may set, one function each, by the ids of IFEval and IFBench."""
