"""Rewards for slime: a module a reward, each named like what `--rm-type` chooses; the README has the table.

`answers` compares mathematics for all of them, `choice` reads options, `sandbox` runs programs, `posting` asks servers,
`adapters` calls rewards of other frameworks. sympy is imported only when two answers are written differently.
"""
