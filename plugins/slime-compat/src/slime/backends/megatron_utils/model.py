"""Not here; importing it says what to use."""

from slime_compat.views.absent import absent

raise absent(__name__)
