"""`MEMORY`: nothing is predicted of latent attention with an indexer. Imports no torch."""

from __future__ import annotations

from slime_megatron.memory.family_memory import FamilyMemory

MEMORY = FamilyMemory(unknown="its masks of all pairs of tokens would have to be reckoned with")
