"""The launcher `ray`: the ranks of a trainer as Ray actors."""
