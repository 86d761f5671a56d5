"""Parts of decoder layers: attention, norms, MLPs, routers and experts."""
