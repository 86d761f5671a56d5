"""Advantages, losses and KL for slime, as pure functions over tensors.

`advantages/` and `losses/` hold one algorithm a file; `kl` and `ratio` the quantities that they share;
`reducers` how token losses become one number (numpy only). Nothing here communicates: shares of micro-batches
and ranks add up.
"""
