"""Which machine and which GPUs each process of a run gets, and the cluster that has them."""
