"""The default policy: a batch leaves shortly before the instance is ready for it."""
