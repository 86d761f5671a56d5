"""Not here; importing it says what to use."""

from slime_compat.views.running.absent import absent

raise absent(__name__)
