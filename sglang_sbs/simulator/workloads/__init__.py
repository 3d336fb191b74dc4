"""Who sends what, when: arrivals, conversations, classes, named scenarios."""
