"""Our numbers beside those of verl, TRL and OpenRLHF, on the same random ragged inputs.

`case` makes the inputs, `rows` compares, `verl`, `trl` and `openrlhf` call the peers' own functions, `command` is
`slime bench conformance`. No peer is imported before it is asked.
"""
