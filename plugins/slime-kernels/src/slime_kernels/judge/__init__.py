"""The judge: what becomes of a candidate, gate by gate, and the reward for it. Imports neither torch nor triton."""
