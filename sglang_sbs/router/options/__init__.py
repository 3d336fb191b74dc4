"""The command line: arguments, their checks, and the options they become."""
