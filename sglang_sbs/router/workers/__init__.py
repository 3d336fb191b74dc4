"""The workers: what is known of each, how it is, and where it was found."""
