"""Rewards for slime.

`math` grades boxed answers, `exact` compares text, `chance` ignores the response. sympy is imported only when two
answers are written differently.
"""
