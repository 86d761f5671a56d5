"""Running Python that nobody trusts: `running` outside, `confine` and `filter` inside."""
