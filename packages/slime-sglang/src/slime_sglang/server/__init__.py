"""One server: its command line, its child process, and external servers, which somebody else started."""
