"""Which of several scheduler processes is active: decided by a fixed order (without a lock) or an
election, and found by the front ends."""
