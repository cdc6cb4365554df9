"""One volunteer's box: the command line, the daemon and its trainer process."""
