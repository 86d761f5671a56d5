"""Problems: KernelBench's format, generated ones, and the data sources over both."""
