"""Packed micro-batches on a rank's device, made from a `TrainBatch`."""
