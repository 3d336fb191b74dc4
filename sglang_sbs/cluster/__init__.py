"""A PD cluster on this machine: planning, start, supervision and stop. ``local`` combines these.
Uses only SGLang's command line and HTTP interface; imports neither torch nor SGLang."""
