"""Log-probs of a teacher on a server, `--rm-url`, in the place of rewards."""

from slime_compat.views.generating.teacher import post_process_rewards, reward_func

__all__ = ["post_process_rewards", "reward_func"]
