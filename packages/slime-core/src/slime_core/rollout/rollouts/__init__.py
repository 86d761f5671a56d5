"""The rollout functions that come with core: where the samples of a step come from."""
