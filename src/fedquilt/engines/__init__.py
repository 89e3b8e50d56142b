"""Training many clients: objectives, optimisers, and the engines that run them stacked, in workers, or one by one."""
