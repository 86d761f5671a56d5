"""Log-probs of a custom loss, and a correction."""

from slime_compat.views.corrections import icepop_function
from slime_compat.views.logits import get_log_probs_and_entropy

__all__ = ["get_log_probs_and_entropy", "icepop_function"]
