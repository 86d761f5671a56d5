"""What can be set, and reading it: command lines, recipes, words, and what is wrong with them."""
