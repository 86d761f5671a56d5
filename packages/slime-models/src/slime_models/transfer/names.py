"""The names of all transports. Imports nothing."""

#: What `WeightSender` can send by.
TRANSPORTS = ("memory", "distributed", "disk", "disk-delta")
