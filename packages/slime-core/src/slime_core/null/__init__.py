"""The engine `none` and the trainer `none`, for runs that need only the other."""
