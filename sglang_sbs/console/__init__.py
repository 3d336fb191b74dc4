"""Helpers shared by the commands: texts, output files, and required packages."""
