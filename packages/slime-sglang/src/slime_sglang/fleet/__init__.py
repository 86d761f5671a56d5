"""Several engines of one model: load balancing, health checks, replacement of engines that are lost."""
