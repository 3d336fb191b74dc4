"""Health of the cluster: present and past alerts with cause and advice. Sans-I/O."""
