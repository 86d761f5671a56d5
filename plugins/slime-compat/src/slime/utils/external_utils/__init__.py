"""Import names of the reference system; see the package `slime`."""
