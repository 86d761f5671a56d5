"""`slime bench controller`: what a step costs beside its engine and its trainer."""
