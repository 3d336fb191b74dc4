"""Which scheduler leads, as schedulers and front ends see it, without a store or with one."""
