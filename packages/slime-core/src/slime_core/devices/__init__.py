"""What is known of the GPUs of a machine without a package that computes, and the variables of processes that use them."""
