"""Kernel generation: multi-turn RL for Triton kernels.

`problems` are what is to be made fast, `gates` what a kernel must pass, `sandbox` the processes in which candidates run,
`judge` decides, `turns` lets a policy try again with what it was told, `service` judges for others over HTTP.
"""
